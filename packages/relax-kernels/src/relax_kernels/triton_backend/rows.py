"""Tensors of any leading axes seen as rows, without copies where the strides allow.

R rows, D features. Row r starts at (r // inner) * outer_stride + (r % inner) * inner_stride: that covers
dense tensors and the usual views, such as the heads of one part of a fused projection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from relax_kernels.triton_backend.launch import dense_rows


class Rows(NamedTuple):
    """A tensor [..., D] whose last axis is dense, and where its rows lie."""

    tensor: torch.Tensor
    size: int
    inner: int
    outer_stride: int
    inner_stride: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Return (inner, outer_stride, inner_stride), as the kernels take them."""
        return self.inner, self.outer_stride, self.inner_stride


def as_rows(tensor: torch.Tensor) -> Rows:
    """See a tensor [..., D] as rows; it is copied if two strides do not describe them."""
    if tensor.is_contiguous():
        width = tensor.shape[-1]
        return Rows(tensor, tensor.numel() // width if width else 0, 1, width, 0)
    tensor = dense_rows(tensor)
    axes = _merged(tensor)
    if len(axes) > 2:
        tensor = tensor.contiguous()
        axes = _merged(tensor)
    count = 1
    for size in tensor.shape[:-1]:
        count *= size
    if not axes:
        return Rows(tensor, count, 1, 0, 0)
    if len(axes) == 1:
        return Rows(tensor, count, 1, axes[0][1], 0)
    (_, outer), (inner, stride) = axes
    return Rows(tensor, count, inner, outer, stride)


def _merged(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (size, stride) of the leading axes, neighbours joined where one runs into the next."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return axes
