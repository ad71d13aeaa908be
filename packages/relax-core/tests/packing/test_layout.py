import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relax_core.packing import PackedLayout
from relax_core.packing.zigzag import Piece


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


@pytest.mark.parametrize("size", [1, 2, 3])
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), multiple=st.integers(1, 4))
def test_ranks_share_the_row_and_the_causal_work_equally(size, lengths, multiple):
    parts = [
        PackedLayout.build(lengths, pad_to_multiple=multiple, context_size=size, context_rank=rank)
        for rank in range(size)
    ]
    whole = parts[0]
    assert whole.padded_total % multiple == 0
    assert whole.local_total * size == whole.padded_total < whole.total + 2 * multiple * size
    row_T = torch.arange(whole.padded_total)
    held = [part.local(row_T) for part in parts]
    assert sorted(torch.cat(held).tolist()) == row_T.tolist()
    assert all(torch.equal(part.local_index_T, own) for part, own in zip(parts, held, strict=True))
    assert len({int((own + 1).sum()) for own in held}) == 1, "keys that a rank's queries see"


def test_the_zigzag_by_hand():
    def local(rank):
        return PackedLayout.build([7], context_size=2, context_rank=rank).local(torch.arange(8)).tolist()

    assert (local(0), local(1)) == ([0, 1, 6, 7], [2, 3, 4, 5])


def test_equal_rows_hold_the_same_samples():
    layout = PackedLayout.build([3, 1, 4], row_length=4, pad_to_multiple=8)
    assert layout.cu_seqlens.host == (0, 3, 4, 5, 8, 12, 16)
    assert layout.sample_ids_T.tolist() == [0, 0, 0, -1, 1, -1, -1, -1, 2, 2, 2, 2, -1, -1, -1, -1]
    packed_T = layout.pack([[1, 2, 3], [4], [5, 6, 7, 8]], dtype=torch.int64)
    assert layout.rows(packed_T).tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 7, 8]]
    assert [own.tolist() for own in layout.unpack(packed_T)] == [[1, 2, 3], [4], [5, 6, 7, 8]]
    assert layout.shift(packed_T, 1)[:8].tolist() == [2, 3, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"row_length": 3}, r"lengths\[1\] is 4, more than row_length 3"),
        ({"context_size": 2, "context_rank": 2}, "context_rank 2 does not exist among 2 ranks"),
        ({"pad_to_multiple": 0}, "pad_to_multiple is 0"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        PackedLayout.build([2, 4], **options)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 60), st.integers(0, 60))
def test_a_piece_knows_its_segments_and_its_borders(lengths, start, size):
    segments = PackedLayout.build(lengths).cu_seqlens
    start = min(start, segments.total)
    stop = min(start + size, segments.total)
    piece = Piece.cut(segments, start, stop)
    owners = segments.segment_ids("cpu").tolist()
    inside = owners[start:stop]
    assert piece.lengths == tuple(inside.count(owner) for owner in sorted(set(inside)))
    assert piece.carried == (owners[:start].count(inside[0]) if inside else 0)
    assert piece.goes_on is bool(inside and inside[-1] in owners[stop:])
