"""Group filters."""

import pytest
from relax_rollout.filters import load_filter, nonzero_spread
from relax_rollout.rewards import RewardResult


def group(*scores: float) -> list[RewardResult]:
    return [RewardResult(score=score) for score in scores]


def test_groups_of_equal_scores_are_dropped():
    keep = load_filter("nonzero_spread")
    assert keep is nonzero_spread
    assert not keep(group(1.0, 1.0, 1.0))
    assert not keep(group(0.0))
    assert not keep(group())
    assert keep(group(0.0, 0.0, 1.0))
    assert keep(group(0.0, 1e-9))


def test_no_filter_keeps_all():
    assert load_filter("none")(group(1.0, 1.0))


def test_ones_own_filter(tmp_path, monkeypatch):
    (tmp_path / "my_filter.py").write_text("def keep(results):\n    return results[0].score > 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    keep = load_filter("my_filter:keep")
    assert keep(group(1.0, 1.0))
    assert not keep(group(0.0, 1.0))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("spread", "no filter is called 'spread'; give nonzero_spread"),
        ("os:nothing", "cannot be imported"),
        ("no_such:f", "cannot be imported"),
    ],
)
def test_unknown_filters_are_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        load_filter(spec)
