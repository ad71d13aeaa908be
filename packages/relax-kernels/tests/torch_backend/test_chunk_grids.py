import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_kernels import CuSeqlens
from relax_kernels.torch_backend.chunks import ChunkGrid, grids_of

lengths_strategy = st.lists(st.integers(0, 120), max_size=10)
CPU = torch.device("cpu")


def grids(lengths: list[int], max_cells: int = 64) -> tuple[ChunkGrid, ...]:
    return grids_of(CuSeqlens.from_lengths(lengths), max_cells, CPU)


@settings(deadline=None)
@given(lengths_strategy)
def test_spread_then_collect_returns_every_token(lengths: list[int]) -> None:
    x_TH = torch.arange(sum(lengths) * 6, dtype=torch.float32).view(-1, 2, 3)
    back_TH = torch.full_like(x_TH, torch.nan)
    for grid in grids(lengths):
        grid.collect(grid.spread(x_TH), back_TH)
    assert torch.equal(back_TH, x_TH)


@settings(deadline=None)
@given(lengths_strategy)
def test_empty_cells_are_zero_whatever_the_tokens_are(lengths: list[int]) -> None:
    x_TH = torch.full((sum(lengths), 2, 3), torch.nan)
    for grid in grids(lengths):
        spread = grid.spread(x_TH)
        assert int(spread.isnan().sum()) == len(grid.token_T) * 6
        assert (spread[~spread.isnan()] == 0).all()


@settings(deadline=None)
@given(lengths_strategy)
def test_each_step_holds_the_next_chunk_of_the_first_ranks(lengths: list[int]) -> None:
    cu = CuSeqlens.from_lengths(lengths)
    seen = []
    for grid in grids(lengths):
        assert list(grid.counts) == sorted(grid.counts, reverse=True)
        assert sum(grid.counts) == grid.chunks
        sequences = grid.sequence_N.tolist()
        seen += sequences
        cells = grid.token_MC.view(grid.chunks, grid.chunk)
        for step, (start, count) in enumerate(zip(grid.starts, grid.counts, strict=True)):
            for rank in range(count):
                first = cu.host[sequences[rank]] + step * grid.chunk
                assert cells[start + rank, 0] == first
                assert first < cu.host[sequences[rank] + 1]
    assert sorted(seen) == [i for i, length in enumerate(lengths) if length]


def test_short_sequences_are_one_chunk_each_with_little_padding() -> None:
    lengths = [12 + i % 9 for i in range(256)]
    made = grids(lengths, max_cells=10**6)
    assert all(len(grid.counts) == 1 for grid in made)
    assert sum(grid.chunks * grid.chunk for grid in made) <= 1.2 * sum(lengths)


def test_one_full_sequence_does_not_move() -> None:
    (grid,) = grids([96])
    assert grid.is_packed_order
    (grid,) = grids([95])
    assert not grid.is_packed_order


def test_grids_stay_below_the_bound_but_never_cut_a_sequence() -> None:
    assert [len(grid.token_T) for grid in grids([16, 16, 16, 16, 16], max_cells=40)] == [32, 32, 16]
    assert [len(grid.token_T) for grid in grids([100, 100], max_cells=40)] == [100, 100]


def test_grids_are_made_once() -> None:
    cu = CuSeqlens.from_lengths((5, 70))
    assert grids_of(cu, 64, CPU) is grids_of(cu, 64, CPU)
