import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relax_core.packing import PackedLayout


def test_positions_restart_at_every_sample_and_padding_is_a_segment_of_its_own():
    layout = PackedLayout.build([3, 1, 2], pad_to_multiple=4)
    assert layout.total == 6
    assert layout.padded_total == 8
    assert layout.cu_seqlens.host == (0, 3, 4, 6, 8)
    assert layout.position_ids_T.tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
    assert layout.sample_ids_T.tolist() == [0, 0, 0, 1, 2, 2, -1, -1]


def test_ahead_never_leaves_the_sample():
    layout = PackedLayout.build([3, 1, 2], pad_to_multiple=4)
    index_T, valid_T = layout.ahead(1)
    assert valid_T.tolist() == [True, True, False, False, True, False, False, False]
    assert index_T[valid_T].tolist() == [1, 2, 5]
    assert layout.ahead(2)[1].tolist() == [True] + [False] * 7


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 4))
def test_shift_equals_shifting_each_sample_alone(lengths, multiple, distance):
    layout = PackedLayout.build(lengths, pad_to_multiple=multiple)
    samples = [torch.arange(1, n + 1) + 100 * i for i, n in enumerate(lengths)]
    shifted_T = layout.shift(layout.pack(samples, dtype=torch.int64), distance, fill=-1)
    for own, got in zip(samples, layout.unpack(shifted_T), strict=True):
        assert got.tolist() == own[distance:].tolist() + [-1] * min(distance, len(own))
    assert (shifted_T[layout.total :] == -1).all()


def test_values_of_other_lengths_are_refused():
    layout = PackedLayout.build([3, 1])
    with pytest.raises(ValueError, match=r"from sample 1: got \(3, 2\), expected \(3, 1\)"):
        layout.pack([[1, 2, 3], [4, 5]], dtype=torch.int64)


@pytest.mark.parametrize(("lengths", "words"), [([], "empty"), ([2, 0], r"lengths\[1\] is 0")])
def test_impossible_lengths_are_refused(lengths, words):
    with pytest.raises(ValueError, match=words):
        PackedLayout.build(lengths)
