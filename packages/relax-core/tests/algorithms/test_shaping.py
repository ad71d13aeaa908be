import pytest
from relax_core.algorithms.shaping import overlong_penalty


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (60, 0.0), (70, 0.25), (90, 0.75), (100, 1.0), (120, 1.0)]
)
def test_the_penalty_grows_over_the_zone_before_the_cut(length, penalty):
    # 100 tokens with a zone of 40: begins behind 60, 10 tokens cost a quarter.
    assert overlong_penalty(length, longest=100, zone=40) == penalty


def test_without_a_zone_there_is_none():
    assert overlong_penalty(100, longest=100, zone=0) == 0.0
