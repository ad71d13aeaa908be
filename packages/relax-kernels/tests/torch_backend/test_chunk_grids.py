import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_kernels import CuSeqlens
from relax_kernels.torch_backend.chunks import ChunkLayout

lengths_strategy = st.lists(st.integers(0, 120), max_size=10)
CPU = torch.device("cpu")


def layout(lengths: list[int], max_cells: int = 300) -> ChunkLayout:
    return ChunkLayout.of(CuSeqlens.from_lengths(lengths), max_cells, CPU)


@settings(deadline=None)
@given(lengths_strategy)
def test_spread_then_collect_returns_every_token(lengths: list[int]) -> None:
    x_TH = torch.arange(sum(lengths) * 6, dtype=torch.float32).view(-1, 2, 3)
    made = layout(lengths)
    assert torch.equal(made.collect(made.spread(x_TH), (2, 3), torch.float32), x_TH)


@settings(deadline=None)
@given(lengths_strategy)
def test_empty_cells_are_zero_whatever_the_tokens_are(lengths: list[int]) -> None:
    parts = layout(lengths).spread(torch.full((sum(lengths), 2, 3), torch.nan))
    assert sum(int(part.isnan().sum()) for part in parts) == sum(lengths) * 6
    assert all((part[~part.isnan()] == 0).all() for part in parts)


@settings(deadline=None)
@given(lengths_strategy)
def test_each_step_holds_the_next_chunk_of_the_first_ranks(lengths: list[int]) -> None:
    cu = CuSeqlens.from_lengths(lengths)
    seen = []
    made = layout(lengths)
    for grid in made.grids:
        assert list(grid.counts) == sorted(grid.counts, reverse=True)
        assert sum(grid.counts) == grid.chunks
        sequences = grid.sequence_N.tolist()
        seen += sequences
        cells = made.token_of_cell[grid.cells].view(grid.chunks, grid.chunk)
        for step, (start, count) in enumerate(zip(grid.starts, grid.counts, strict=True)):
            for rank in range(count):
                first = cu.host[sequences[rank]] + step * grid.chunk
                assert cells[start + rank, 0] == first
                assert first < cu.host[sequences[rank] + 1]
    assert sorted(seen) == [i for i, length in enumerate(lengths) if length]


def test_short_sequences_are_one_chunk_each_with_little_padding() -> None:
    lengths = [12 + i % 9 for i in range(256)]
    made = layout(lengths, max_cells=10**6)
    assert all(len(grid.counts) == 1 for grid in made.grids)
    assert len(made.token_of_cell) <= 1.2 * sum(lengths)


def test_one_full_sequence_does_not_move() -> None:
    assert layout([96]).in_order
    assert not layout([95]).in_order


def test_grids_stay_below_the_bound_but_never_cut_a_sequence() -> None:
    assert [grid.chunks * grid.chunk for grid in layout([16] * 5, max_cells=40).grids] == [32, 32, 16]
    assert [grid.chunks * grid.chunk for grid in layout([100, 100], max_cells=40).grids] == [128, 128]


def test_layouts_are_made_once() -> None:
    cu = CuSeqlens.from_lengths((5, 70))
    assert ChunkLayout.of(cu, 64, CPU) is ChunkLayout.of(cu, 64, CPU)
