"""A detached draft loss moves trunk, embedding and head by nothing at all, whichever ranks hold them."""

from dataclasses import replace

import pytest
import torch
from relax_core.testing import Row

# Clipping joins all gradients in one norm, and through it every weight.
_UNCLIPPED = {"clip_grad": 0.0}
_SP = {"tensor": 2, "sequence": True}
_TIED = {"tie_word_embeddings": True}
LAYOUTS = (
    Row("pp2-tied", 2, {"pipeline": 2}, mtp=2, model=_TIED, trainer=_UNCLIPPED),
    Row(
        "tp2-sp-full", 2, {"tensor": 2, "sequence": True}, mtp=1, trainer={**_UNCLIPPED, "recompute": "full"}
    ),
    Row("moe-cp2-ep2", 2, {"context": 2, "expert": 2}, mtp=1, family="moe", trainer=_UNCLIPPED),
)


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=r.name, marks=pytest.mark.parity if i else ()) for i, r in enumerate(LAYOUTS)]
)
def test_its_coefficient_changes_no_bit_outside_of_the_draft_layers(pools, row):
    small, large = (
        pools(2).run(replace(row, draft={"loss_coefficient": coefficient})) for coefficient in (0.1, 30.0)
    )
    for before, after in zip(small.gradients, large.gradients, strict=True):
        same = {name: torch.equal(gradient, after[name]) for name, gradient in before.items()}
        assert [name for name, equal in same.items() if not equal and not name.startswith("mtp.")] == []
    # In the first step, where all else is equal, the drafts' own gradients follow it.
    moved = [
        name
        for name, gradient in small.gradients[0].items()
        if not torch.equal(gradient, large.gradients[0][name])
    ]
    assert moved == [name for name in small.gradients[0] if name.startswith("mtp.")]
