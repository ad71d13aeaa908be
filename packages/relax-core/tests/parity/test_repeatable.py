"""A layout trained twice gives the same bits."""

import pytest
import torch
from relax_core.testing.table import ROWS


@pytest.mark.parametrize("name", ["cp2-heads-state-mtp1", "tp2-one-kv-head"])
def test_a_layout_gives_the_same_bits_again(name, pools):
    (row,) = (row for row in ROWS if row.name == name)
    first, again = (pools(row.ranks).run(row) for _ in range(2))
    assert first.metrics == again.metrics
    for before, after in zip(first.gradients, again.gradients, strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(torch.equal(first.weights[key], again.weights[key]) for key in first.weights)
