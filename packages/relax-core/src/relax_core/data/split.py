"""Splits examples into those trained on and those held out."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relax_core.data.examples import Example
from relax_core.data.problems import DataError


def held_out_of(examples: Sequence[Example], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Holds out a share of the distinct prompts.

    Invariants: no prompt is on both sides; which prompts are held out depends on their text, the fraction and
    the seed, not on the order of rows.

    Args:
        examples: in order of rows.
        fraction: of the distinct prompts, in [0, 1); above 0 at least one prompt is held out.
        seed: of the choice.

    Returns:
        [examples] bool, set for those that are held out.

    Raises:
        DataError: nothing would be left to train on.
    """
    if fraction == 0:
        return np.zeros(len(examples), np.bool_)
    ranks = [_rank(seed, example.prompt_text) for example in examples]
    prompts = sorted(set(ranks))
    count = max(1, round(fraction * len(prompts)))
    if count >= len(prompts):
        raise DataError(
            f"data.eval_fraction {fraction:g} of {len(prompts)} distinct prompts leaves none to train on: "
            "lower it"
        )
    chosen = set(prompts[:count])
    return np.fromiter((rank in chosen for rank in ranks), np.bool_, len(ranks))


def _rank(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}\n{text}".encode()).digest()
