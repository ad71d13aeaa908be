import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_kernels import CuSeqlens
from relax_kernels.testing import Target, parity_cases
from relax_kernels.torch_backend import attention_tiles
from relax_kernels.torch_backend.attention_tiles import tiles_of

CPU = torch.device("cpu")
pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@settings(deadline=None)
@given(pairs, st.booleans())
def test_every_query_and_its_keys_are_seen_once(lengths: list[tuple[int, int]], causal: bool) -> None:
    queries, keys = (
        CuSeqlens.from_lengths(column) for column in ([n for n, _ in lengths], [m for _, m in lengths])
    )
    seen: dict[int, set[int]] = {}
    query_T, key_S = torch.arange(queries.total), torch.arange(keys.total)
    for tile in tiles_of(queries, keys, 2, causal, CPU):
        mask = tile.mask_B11IJ()
        query_BI, key_BJ = tile.queries.take(query_T), tile.keys.take(key_S)
        empty_BI = torch.zeros_like(query_BI, dtype=torch.bool) if tile.empty_BI is None else tile.empty_BI
        for b, i in (~empty_BI).nonzero().tolist():
            row = int(query_BI[b, i])
            visible = torch.ones(tile.seen, dtype=torch.bool)
            if mask is not None:
                visible[tile.seen_by_all :] = ~mask[b, 0, 0, i]
            if tile.blind_row is not None and row in tile.blind_row:
                visible[:] = False
            assert row not in seen
            seen[row] = set(key_BJ[b][visible].tolist())
    for segment, (n, m) in enumerate(lengths):
        for i in range(n if m else 0):
            first = keys.host[segment]
            last = min(m, i + m - n + 1) if causal else m
            assert seen.pop(queries.host[segment] + i) == set(range(first, first + max(last, 0)))
    assert not seen


@pytest.mark.parametrize("lengths", [(3, 5, 5, 2), (7,)], ids=str)
def test_what_is_taken_is_put_and_added_back(lengths: tuple[int, ...]) -> None:
    cu = CuSeqlens.from_lengths(lengths)
    (tile,) = tiles_of(cu, cu, 1, True, CPU)
    x_T = torch.arange(1.0, cu.total + 1)
    put_T, added_T = torch.zeros_like(x_T), x_T.clone()
    tile.queries.put(put_T, tile.queries.take(x_T))
    tile.keys.add(added_T, tile.keys.take(x_T))
    assert torch.equal(put_T, x_T)
    assert torch.equal(added_T, 2 * x_T)


@pytest.mark.parametrize(
    "case", [c for c in parity_cases() if c.op == "attention"], ids=lambda case: case.name
)
def test_small_tiles_give_the_same_results(case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "TILE_SCORES", 3000)
    monkeypatch.setattr(attention_tiles, "FEWEST_QUERIES", 5)
    case.check(Target("torch", "cpu"))


def test_one_tile_holds_many_short_sequences() -> None:
    cu = CuSeqlens.from_lengths([12 + i % 9 for i in range(64)])
    assert len(tiles_of(cu, cu, 4, True, CPU)) == 2  # up to 16 tokens, and up to 32
