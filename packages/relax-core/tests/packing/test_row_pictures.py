"""Patches of pictures as the model's processor gave them, looked up where they are needed."""

import numpy as np
import pytest
import torch
from relax_core.packing.pictures import patches_on
from relax_rollout.pictures import Picture

CPU = torch.device("cpu")


@pytest.mark.parametrize("still", [True, False], ids=["still", "moving"])
@pytest.mark.parametrize("levels", [256, 5, 1000], ids=["bytes", "few", "numbers"])
def test_patches_come_back_bit_for_bit(still, levels):
    """One frame is repeated, and more than 256 values of a channel are kept as they are."""
    numbers = np.random.default_rng(levels)
    values = numbers.normal(size=levels).astype(np.float32)
    patches_PCTS = values[numbers.integers(0, levels, (24, 3, 2, 64))]
    if still:
        patches_PCTS = patches_PCTS[:, :, :1].repeat(2, axis=2)
    picture = Picture.of(patches_PCTS.reshape(24, -1), (1, 4, 6), merge=2, channels=3, frames=2)
    assert picture.codes.dtype == (np.float32 if levels > 256 else np.uint8)
    found_PF = patches_on(CPU, picture)
    assert torch.equal(found_PF, torch.from_numpy(patches_PCTS.reshape(24, -1)))
    assert found_PF.dtype == torch.float32
