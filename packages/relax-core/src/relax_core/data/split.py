"""Splits examples into those trained on and those held out."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from relax_core.data.examples import Example
from relax_core.data.problems import DataError

E = TypeVar("E", bound=Example)


def split_held_out(examples: Sequence[E], fraction: float, seed: int) -> tuple[tuple[E, ...], tuple[E, ...]]:
    """Holds out a share of the distinct prompts.

    Invariants: no prompt is on both sides; which prompts are held out depends on their text, the fraction and
    the seed, not on the order of rows; both sides keep the order of rows.

    Args:
        examples: in order of rows.
        fraction: of the distinct prompts, in [0, 1); above 0 at least one prompt is held out.
        seed: of the choice.

    Returns:
        (train, held_out)

    Raises:
        DataError: nothing would be left to train on.
    """
    if fraction == 0:
        return tuple(examples), ()
    prompts = sorted({example.prompt_text for example in examples}, key=lambda text: _rank(seed, text))
    count = max(1, round(fraction * len(prompts)))
    if count >= len(prompts):
        raise DataError(
            f"data.eval_fraction {fraction:g} of {len(prompts)} distinct prompts leaves none to train on: "
            "lower it"
        )
    chosen = set(prompts[:count])
    return (
        tuple(example for example in examples if example.prompt_text not in chosen),
        tuple(example for example in examples if example.prompt_text in chosen),
    )


def _rank(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}\n{text}".encode()).digest()
