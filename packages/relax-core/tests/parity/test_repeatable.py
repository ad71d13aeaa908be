"""A layout trained twice gives the same bits."""

from dataclasses import replace

import pytest
import torch
from relax_core.testing import Row
from relax_core.testing.table import ROWS


@pytest.mark.parametrize("name", ["cp2-heads-state-mtp1", "tp2-one-kv-head"])
def test_a_layout_gives_the_same_bits_again(name, pools):
    (row,) = (row for row in ROWS if row.name == name)
    first, again = (pools(row.ranks).run(row) for _ in range(2))
    assert first.metrics == again.metrics
    for before, after in zip(first.gradients, again.gradients, strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(torch.equal(first.weights[key], again.weights[key]) for key in first.weights)


@pytest.mark.parity
def test_dropout_is_the_same_when_computed_again_and_after_a_checkpoint(pools, tmp_path):
    lora = {"rank": 3, "alpha": 6.0, "dropout": 0.3, "drafts": True}
    row = Row("tp2-sp-dropout", 2, {"tensor": 2, "sequence": True}, mtp=1, lora=lora)
    again = replace(row, trainer={"recompute": "full"})
    assert pools(2).run(again).metrics == pools(2).run(row).metrics
    through = pools(2).run(again, "save", folder=str(tmp_path))
    resumed = pools(2).run(again, "resume", folder=str(tmp_path))
    assert resumed.metrics == through.metrics
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in through.weights.items())
