"""Training that stops in one layout goes on in the same one exactly, and in any other to rounding."""

from dataclasses import replace

import pytest
import torch
from relax_core.testing import Row, differences

REL, FLOOR = 2e-4, 2e-6
_SP = {"tensor": 2, "sequence": True}
_JOINED = {"detach_embedding": False, "detach_trunk": False, "detach_head": False}
# A learning rate that changes with every step shows in its metric where the schedule stands.
_SCHEDULE = {"schedule": "linear", "warmup_steps": 2}
_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_DENSE = {"mtp": 1, "draft": _JOINED, "model": {"tie_word_embeddings": True}}
_LORA = {"rank": 3, "alpha": 6.0}
_EXPERTS = {**_LORA, "targets": ("in_proj", "linear_fc1", "experts")}
_MOE = {"family": "moe", "mtp": 1, "balance": 0.5}


def layout(name, ranks, parallel, **options):
    kind = _MOE if name.startswith("moe") else _DENSE
    return Row(name, ranks, parallel, **kind, trainer={**_SCHEDULE, **options})


LAYOUTS = {
    row.name: row
    for row in (
        layout("one", 1, {}),
        layout("tp2-sp", 2, _SP),
        layout("pp2", 2, {"pipeline": 2}),
        layout("pp2-chunks2", 2, {"pipeline": 2, "pipeline_chunks": 2}),
        layout("pp2-last-1", 2, {"pipeline": 2, "last_stage_layers": 1}),
        layout("dp2", 2, {}, **_OVERLAP),
        layout("cp2", 2, {"context": 2}),
        layout("tp2-sp-pp2", 4, {**_SP, "pipeline": 2}),
        layout("moe-one", 1, {}),
        layout("moe-dp2", 2, {}, **_OVERLAP),
        layout("moe-ep2", 2, {"expert": 2}),
        layout("moe-tp2-sp", 2, _SP),
        layout("moe-tp2-sp-etp1", 2, {**_SP, "expert_tensor": 1}),
        layout("moe-tp2-sp-ep2-etp1", 2, {**_SP, "expert": 2, "expert_tensor": 1}),
        layout("moe-pp2", 2, {"pipeline": 2}),
        layout("moe-cp2-ep2", 2, {"context": 2, "expert": 2}),
        Row("tp2-sp-lora", 2, _SP, lora=_LORA),
        Row("pp2-lora", 2, {"pipeline": 2}, lora=_LORA),
        Row("moe-ep2-lora", 2, {"expert": 2}, lora=_EXPERTS, family="moe"),
        Row("moe-dp2-lora", 2, lora=_EXPERTS, family="moe"),
    )
}
PAIRS = [
    ("tp2-sp-lora", "pp2-lora"), ("moe-ep2-lora", "moe-dp2-lora"),
    ("tp2-sp", "pp2"), ("pp2", "dp2"), ("dp2", "tp2-sp"), ("cp2", "one"), ("one", "tp2-sp-pp2"),
    ("pp2-chunks2", "tp2-sp"), ("pp2", "pp2-chunks2"), ("pp2-last-1", "dp2"), ("tp2-sp", "pp2-last-1"),
    ("moe-ep2", "moe-one"), ("moe-one", "moe-ep2"), ("moe-ep2", "moe-dp2"), ("moe-dp2", "moe-tp2-sp-etp1"),
    ("moe-ep2", "moe-pp2"), ("moe-tp2-sp", "moe-ep2"), ("moe-tp2-sp-etp1", "moe-tp2-sp"),
    ("moe-tp2-sp", "moe-tp2-sp-ep2-etp1"), ("moe-tp2-sp-ep2-etp1", "moe-cp2-ep2"),
]  # fmt: skip
QUICK = [("tp2-sp", "pp2")]


def marks(pair):
    return () if pair in QUICK else pytest.mark.parity


marked = [pytest.param(*pair, id=" to ".join(pair), marks=marks(pair)) for pair in PAIRS]


@pytest.mark.parametrize(("before", "after"), marked)
def test_training_goes_on_in_another_layout(pools, tmp_path, before, after):
    before, after = LAYOUTS[before], LAYOUTS[after]
    through = pools(before.ranks).run(before, "save", folder=str(tmp_path))
    again = pools(before.ranks).run(before, "resume", folder=str(tmp_path))
    assert again.metrics == through.metrics
    assert all(torch.equal(again.weights[name], weight) for name, weight in through.weights.items())
    assert again.drawn == through.drawn
    moved = pools(after.ranks).run(after, "resume", folder=str(tmp_path))
    assert moved.drawn == through.drawn
    lines = differences(moved, through, rel=REL, floor=FLOOR)
    assert not lines, "\n".join(lines)


@pytest.mark.parity
@pytest.mark.parametrize(("before", "after"), [("tp2-sp", "pp2"), ("pp2", "dp2")])
def test_a_draft_layer_is_added_in_any_layout(pools, tmp_path, before, after):
    before, *rest = (LAYOUTS[name] for name in (before, "one", after))
    pools(before.ranks).run(before, "save", folder=str(tmp_path))
    one, other = (
        pools(row.ranks).run(replace(row, mtp=2), "resume", folder=str(tmp_path), added=["mtp.layers.1."])
        for row in rest
    )
    lines = differences(other, one, rel=REL, floor=FLOOR)
    assert not lines, "\n".join(lines)


@pytest.mark.parity
@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", "dp2"])
def test_a_checkpoint_written_behind_training_is_that_of_its_step(pools, tmp_path, layout):
    row = LAYOUTS[layout]
    at_once = pools(2).run(row, "save", folder=str(tmp_path / "a"))
    behind = pools(2).run(row, "save", folder=str(tmp_path / "b"), asynchronous=True)
    assert behind.metrics == at_once.metrics
    resumed = pools(2).run(row, "resume", folder=str(tmp_path / "b"))
    assert resumed.metrics == at_once.metrics
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in at_once.weights.items())
