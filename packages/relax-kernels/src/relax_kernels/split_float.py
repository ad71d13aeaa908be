"""Float32 numbers as a bfloat16 and 16 bits more.

    bits(float32) = bits(nearest bfloat16) * 2^16 + remainder

with a signed remainder, which says how far the rounding went and which way. Half-way cases go to the larger
magnitude: to the even one, two float32 would share one code.
"""

from __future__ import annotations

import torch

from relax_kernels.errors import InvalidInput

HALF_UNIT = 0x8000
"""What rounds to the nearest in `cut_to_bfloat16`."""


def split_float32(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest bfloat16 and the int16 remainder of float32 numbers; all NaN alike.

    Raises InvalidInput for another dtype.
    """
    _require("split_float32", x, torch.float32)
    low = ((_bits(x) & 0xFFFF) ^ 0x8000) - 0x8000
    return cut_to_bfloat16(x, HALF_UNIT), low.to(torch.int16)


def join_float32(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers that `split_float32` took apart, bit for bit.

    Raises InvalidInput unless they are bfloat16 and int16.
    """
    _require("join_float32", high, torch.bfloat16)
    _require("join_float32", remainder, torch.int16)
    bits = (high.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    return bits.view(torch.float32)


def cut_to_bfloat16(x: torch.Tensor, added: torch.Tensor | int) -> torch.Tensor:
    """Return float32 numbers cut to bfloat16 after adding `added` to their bits.

    The bits are sign and magnitude: half a unit, `HALF_UNIT`, rounds to the nearest, a random part of a unit
    in [0, 2^16) rounds away from zero as often as the number is near to there.
    """
    return ((_bits(x) + added) >> 16).to(torch.int16).view(torch.bfloat16)


def _require(function: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise InvalidInput(f"{function} takes {dtype}, given {x.dtype}")


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Bits as int32; every NaN as the one that stays NaN without its low half."""
    return torch.where(x.isnan(), 0x7FC00000, x.view(torch.int32))
