"""Partial rotary position embedding with interleaved multi-section positions.

T tokens, H heads, D head dim, R rotated features (R <= D, even).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relax_kernels.check import FLOATS, Checker
from relax_kernels.contract import Call
from relax_kernels.registry import implementation
from relax_kernels.upload import upload

_INTEGERS = (torch.int32, torch.int64)


def rotary_cos_sin(
    position_ids: torch.Tensor,
    *,
    dim: int,
    base: float,
    sections: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos_TR and sin_TR of the rotation angles; no gradient.

    Angle of feature pair r (r and r + R / 2) at position p: p * base ** (-2 r / R). With three rows of
    position ids (time, height, width of multi-modal tokens), pair r takes its position from row r % 3 while r
    < 3 * sections[r % 3], else from row 0: Qwen3.5's interleaved sections. Equal rows give the same as one
    row.

    Args:
        position_ids: [T] or [3, T], int32 or int64.
        dim: R.
        base: the rotary base (rope_theta).
        sections: how many pairs each row serves, three numbers whose sum is R / 2; needed for three rows.
        dtype: of the result; angles are computed in float32 (float64 if that is asked for).

    Raises:
        InvalidInput: shapes, dtypes or sections do not fit.
    """
    check = Checker("rotary_cos_sin")
    check.whole("dim", dim, 2)
    check.require(dim % 2 == 0, f"dim must be even, given {dim}")
    check.number("base", base)
    check.require(base > 0, f"base must be positive, given {base}")
    check.require(dtype in FLOATS, f"dtype must be a float, given {dtype}")
    multi = isinstance(position_ids, torch.Tensor) and position_ids.ndim == 2
    check.tensor("position_ids", position_ids, ("3", "T") if multi else "T", dtypes=_INTEGERS)
    working = torch.float64 if dtype == torch.float64 else torch.float32
    exponent_P = torch.arange(0, dim, 2, device=position_ids.device, dtype=working) / dim
    frequency_P = 1.0 / base**exponent_P
    if multi:
        check.require(
            position_ids.shape[0] == 3,
            f"position_ids must be [T] or [3, T], given {tuple(position_ids.shape)}",
        )
        if not isinstance(sections, Sequence) or len(sections) != 3:
            raise check.fail(f"sections must be three numbers, given {sections!r}")
        for row, pairs in enumerate(sections):
            check.whole(f"sections[{row}]", pairs, 0)
        check.require(
            sum(sections) == dim // 2, f"sections must have the sum dim / 2 = {dim // 2}, given {sections!r}"
        )
        row_P = upload(torch.tensor(_rows(sections, dim // 2)), position_ids.device)
        angle_TP = position_ids.to(working)[row_P].T * frequency_P
    else:
        angle_TP = position_ids.to(working)[:, None] * frequency_P
    angle_TR = torch.cat((angle_TP, angle_TP), dim=-1)
    return angle_TR.cos().to(dtype), angle_TR.sin().to(dtype)


def _rows(sections: Sequence[int], pairs: int) -> list[int]:
    return [pair % 3 if pair % 3 and pair < 3 * sections[pair % 3] else 0 for pair in range(pairs)]


def rotary(
    x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Rotate the first R of D features of each head, pairing feature r with r + R / 2; differentiable in x.

    y = x * cos + rotate_half(x) * sin on the first R features, where rotate_half((a, b)) = (-b, a); the
    others pass. Computed in float32 (float64 for float64 inputs) and rounded once, to x's dtype.

    Args:
        x_THD: queries or keys.
        cos_TR: from `rotary_cos_sin`; any float dtype.
        sin_TR: from `rotary_cos_sin`; any float dtype.
        backend: name of the backend to use; None lets the registry choose.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit together.
        NoBackend: no backend serves the call.
    """
    call = rotary_call(x_THD, cos_TR, sin_TR)
    result: torch.Tensor = implementation(call, backend)(x_THD, cos_TR, sin_TR)
    return result


def rotary_call(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> Call:
    """Check the inputs of `rotary` and describe the call."""
    check = Checker("rotary")
    check.tensor("x_THD", x_THD, "THD")
    check.tensor("cos_TR", cos_TR, "TR")
    check.tensor("sin_TR", sin_TR, "TR", same_dtype_as=cos_TR)
    rotated, head_dim = check.sizes["R"], check.sizes["D"]
    check.require(
        rotated % 2 == 0 and rotated <= head_dim,
        f"cos_TR has R = {rotated}; it must be even and at most D = {head_dim}",
    )
    check.require(
        not (cos_TR.requires_grad or sin_TR.requires_grad), "cos_TR and sin_TR get no gradient; detach them"
    )
    return check.call([x_THD], {})
