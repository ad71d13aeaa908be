"""Attention and delta net on 2 and 4 context-parallel ranks against one, in float64."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from relax_core.packing import PackedLayout

SCRIPT = Path(__file__).with_name("context_cases.py")
CASES = runpy.run_path(str(SCRIPT))
WEIGHTS = ("dconv", "da_log", "ddt_bias")


@pytest.fixture(scope="module")
def measured(run_ranks, tmp_path_factory):
    """What every rank got, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    variables = [{"RANK": str(rank)} for rank in range(CASES["WORLD"])]
    run_ranks([sys.executable, str(SCRIPT), str(folder)], variables)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(CASES["WORLD"])]


def joined(measured, kind, name, size, lengths=None):
    """The whole row's values from all ranks' parts; gradients of weights are sums."""
    parts = [measured[rank][kind, name, size] for rank in range(size)]
    lengths = lengths or CASES["lengths_of_every_case"]()[name]
    order_T = torch.cat(
        [
            PackedLayout.build(
                lengths, pad_to_multiple=2 * CASES["WORLD"], context_size=size, context_rank=rank
            ).local_index_T
            for rank in range(size)
        ]
    )
    whole = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        whole[key] = sum(values) if key in WEIGHTS else torch.cat(values)[order_T.argsort()]
    return whole


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for name in CASES["lengths_of_every_case"]() for kind in CASES["kinds_of"](name)],
)
@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_ranks_gives_the_numbers_of_one(measured, kind, size, name):
    got, want = joined(measured, kind, name, size), joined(measured, kind, name, 1)
    assert got.keys() == want.keys()
    for key, value in want.items():
        # Sums of up to a hundred float64 terms, taken in another order.
        torch.testing.assert_close(got[key], value, rtol=1e-11, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize(
    ("kind", "gathers", "exchanges"),
    [
        ("attention gather", 1, 0),
        ("attention heads", 0, 2),
        ("delta heads", 0, 2),
        # Samples cross the ranks' borders in every case, so that states are gathered.
        ("delta state", 1, 2),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_costs_the_same_collectives_for_any_number_of_samples(
    measured, kind, size, gathers, exchanges
):
    each_way = ["_allgather_base_", "_reduce_scatter_base_"] * gathers + ["alltoall_base_"] * 2 * exchanges
    for rank in range(size):
        for collectives, _, _ in measured[rank]["watched", kind, size]:
            assert collectives == sorted(each_way)


@pytest.mark.parametrize("kind", CASES["KINDS"])
def test_no_layer_waits_for_the_device_or_makes_a_table_again(measured, kind):
    for size in (1, 2, 4):
        for rank in range(size):
            for _, waits, tables in measured[rank]["watched", kind, size]:
                assert (waits, tables) == ([], 0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", CASES["KINDS"])
def test_state_convolution_and_keys_never_leave_their_sample(measured, kind, size):
    name, lengths = next(iter(CASES["lengths_of_every_case"]().items()))
    layout = PackedLayout.build(lengths, pad_to_multiple=2 * CASES["WORLD"])
    results = [{**rank, (kind, "changed", size): rank.get(("changed", kind, size))} for rank in measured]
    before = joined(measured, kind, name, size)["out"]
    after = joined(results, kind, "changed", size, lengths)["out"]
    for i, (own, other) in enumerate(zip(layout.unpack(before), layout.unpack(after), strict=True)):
        assert torch.equal(own, other) is (i != CASES["CHANGED"])
