"""Every layout of the table trains like one rank; see `relax_core.testing.table` for how to add one."""

from dataclasses import replace

import pytest
import torch
from relax_core.algorithms import algorithm_names, get_algorithm
from relax_core.packing import plan_micro_batches
from relax_core.testing import differences
from relax_core.testing.table import ROWS
from relax_core.testing.task import step_samples
from relax_core.trainer.sample import MicroBatch

# float32 sums in another order: a few hundred roundings of 6e-8 in a gradient, and what three optimizer steps
# make of them. Real faults are orders of magnitude larger, because no weight or sample is small.
REL, FLOOR = 2e-4, 2e-6


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=r.name, marks=() if r.quick else pytest.mark.parity) for r in ROWS]
)
def test_layout_trains_like_one_rank(row, pools, reference):
    wanted = reference(row)
    lines = differences(pools(row.ranks).run(row), wanted, rel=REL, floor=FLOOR)
    assert not lines, "\n".join(lines)


OF = {"policy": "grpo"}


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_is_in_the_table(name):
    """Itself, or one with the same loss and reduction: over context-parallel ranks and in micro-batches."""

    def loss(algorithm):
        return algorithm.loop, algorithm.policy_loss, algorithm.batch_columns, algorithm.default_reduction

    objectives = {row.objective for row in ROWS} - {"value"}
    same = {o for o in objectives if loss(get_algorithm(OF.get(o, o))) == loss(get_algorithm(name))}
    rows = [row for row in ROWS if row.objective in same]
    assert any(row.parallel.get("context") == 2 for row in rows)
    assert any(row.trainer.get("micro_batch_tokens") for row in rows)


def test_the_comparison_sees_a_gradient_that_is_off(reference):
    wanted = reference(ROWS[0])
    gradients = [dict(step) for step in wanted.gradients]
    name = "decoder.layers.1.self_attention.conv1d.weight"
    gradients[1][name] = gradients[1][name] * 1.01
    (line,) = differences(replace(wanted, gradients=gradients), wanted, rel=REL, floor=FLOOR)
    assert line.startswith(f"step 2: gradient of {name} is off by")


def test_the_samples_leave_ranks_and_pieces_without_a_target():
    counted = [[(len(s.tokens_L), int(s.mask_L.sum())) for s in samples] for samples in step_samples(ROWS[0])]
    assert any(length == 1 for step in counted for length, _ in step)
    assert all(any(not targets for _, targets in step) for step in (counted[0], counted[2]))
    # The second step has one sample: a data-parallel rank has none.
    assert plan_micro_batches([length for length, _ in counted[1]], 32, ranks=2) == [[[0]], [[]]]
    found = set()
    for samples in step_samples(ROWS[0]):
        (plan,) = plan_micro_batches([len(s.tokens_L) for s in samples], 32)
        for members in plan:
            pieces = [
                MicroBatch.pack(samples, members, torch.device("cpu"), context_size=2, context_rank=rank)
                for rank in range(2)
            ]
            found.add(tuple(len(piece.scored_S) > 0 for piece in pieces))
    assert {(True, True), (True, False)} <= found or {(True, True), (False, True)} <= found


@pytest.mark.parity
@pytest.mark.parametrize("name", ["tp2-sp-mtp2-policy", "pp2-mtp1", "dp2-overlap-both", "cp2", "moe-ep2"])
def test_the_same_layout_twice_gives_equal_bits(pools, name):
    (row,) = (row for row in ROWS if row.name == name)
    first, second = (pools(row.ranks).run(row) for _ in range(2))
    assert first.metrics == second.metrics
    assert all(torch.equal(second.weights[name], weight) for name, weight in first.weights.items())
