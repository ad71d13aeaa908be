"""Counter-based random numbers: (seed, position) gives the same number in any batch, on any device."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relax_rollout.requests import SEED_LIMIT

_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 2**64 - 1


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014, Fast splittable pseudorandom numbers)."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX_2) & _WORD
    return x ^ (x >> 31)


def _mix_rows(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same for many numbers at once."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def derive_seed(base: int, *path: int) -> int:
    """A seed in [0, 2**63) for one place of a tree, as in ``derive_seed(run_seed, step, prompt, sample)``.

    Each number of ``path`` is mixed in by a SplitMix64 step, so neighbouring places have unrelated seeds and
    order matters.
    """
    state = base & _WORD
    for number in path:
        state = _mix((state + _GAMMA) & _WORD) ^ _mix(((number & _WORD) * _GAMMA + _MIX_1) & _WORD)
    return _mix((state + _GAMMA) & _WORD) % SEED_LIMIT


def stream_of(seed: int) -> int:
    """The 64-bit word from which :func:`uniforms` counts the places of ``seed``."""
    return _mix((seed + _GAMMA) & _WORD)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
    """One uniform number per row.

    Args:
        seeds: a seed per row, in [0, 2**63).
        positions: how many tokens the row has drawn already.

    Returns:
        float32 of the rows' shape, each (k + 1/2) / 2**23 for a whole k below 2**23: exact in float32, never
        0 or 1.
    """
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    gamma = np.uint64(_GAMMA)
    bits = _mix_rows(_mix_rows(seed + gamma) + (position + np.uint64(1)) * gamma)
    whole = (bits >> np.uint64(41)).astype(np.float64)
    return ((whole + 0.5) / 2.0**23).astype(np.float32)
