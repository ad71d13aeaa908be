"""Experts: rows to and from expert order, and the grouped matrix product with a backward pass of its own.

T tokens, E experts, K experts of each token, P = T * K rows sorted by expert, D features in, F features out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from relax_npu.operators.typed import apply

if TYPE_CHECKING:
    from relax_kernels import Permutation

_ROWS, _ROWS_AS_INNER = 0, 2  # group_type: groups of rows of x; groups along the summed axis
_ONE_RESULT = 3
_COUNTS = 1


def permute_tokens(x_TD: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """Serve `relax_kernels.permute_tokens`."""
    x_PD: torch.Tensor = apply(_Permute, x_TD, permutation.token_P, permutation.row_TK)
    return x_PD


def unpermute_tokens(y_PD: torch.Tensor, permutation: Permutation, weight_TK: torch.Tensor) -> torch.Tensor:
    """Serve `relax_kernels.unpermute_tokens`; the kernel takes weights of the rows' dtype."""
    y_TD: torch.Tensor = apply(_Unpermute, y_PD, weight_TK.to(y_PD.dtype), permutation.row_TK)
    return y_TD


def grouped_matmul(x_PD: torch.Tensor, weight_EFD: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
    """Serve `relax_kernels.grouped_matmul`."""
    y_PF: torch.Tensor = apply(_GroupedMatmul, x_PD, weight_EFD, count_E)
    return y_PF


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, token_P: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TD, row_TK)
        return x_TD.index_select(0, token_P)

    @staticmethod
    def backward(ctx: Any, dy_PD: torch.Tensor) -> Any:
        x_TD, row_TK = ctx.saved_tensors
        rows = row_TK.to(torch.int32)
        # The kernel takes the number of choices from the third argument and the rows from the fourth.
        dx_TD = torch.ops.npu.npu_moe_token_permute_grad(x_TD, dy_PD.contiguous(), rows, rows.flatten())
        return dx_TD, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PD: torch.Tensor, weight_TK: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
        rows = row_TK.to(torch.int32).flatten()
        y_PD = y_PD.contiguous()
        ctx.save_for_backward(y_PD, weight_TK, rows)
        y_TD: torch.Tensor = torch.ops.npu.npu_moe_token_unpermute(y_PD, rows, probs=weight_TK)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: torch.Tensor) -> Any:
        y_PD, weight_TK, rows = ctx.saved_tensors
        dy_PD, dweight_TK = torch.ops.npu.npu_moe_token_unpermute_grad(
            y_PD, dy_TD.contiguous(), rows, probs=weight_TK
        )
        return dy_PD, dweight_TK, None


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PD: torch.Tensor, weight_EFD: torch.Tensor, count_E: torch.Tensor
    ) -> torch.Tensor:
        x_PD = x_PD.contiguous()
        ctx.save_for_backward(x_PD, weight_EFD, count_E)
        return _multiply(x_PD, weight_EFD.transpose(1, 2), count_E, _ROWS)

    @staticmethod
    def backward(ctx: Any, dy_PF: torch.Tensor) -> Any:
        x_PD, weight_EFD, count_E = ctx.saved_tensors
        dy_PF = dy_PF.contiguous()
        dx_PD = dweight_EFD = None
        if ctx.needs_input_grad[0]:
            dx_PD = _multiply(dy_PF, weight_EFD, count_E, _ROWS)
        if ctx.needs_input_grad[1]:
            product_EFD = _multiply(dy_PF.T, x_PD, count_E, _ROWS_AS_INNER)
            # A sum over no rows may be left unwritten.
            dweight_EFD = torch.where(count_E[:, None, None] > 0, product_EFD, 0.0)
        return dx_PD, dweight_EFD, None


def _multiply(x: torch.Tensor, weight: torch.Tensor, count_E: torch.Tensor, group_type: int) -> torch.Tensor:
    (product,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight],
        group_list=count_E,
        split_item=_ONE_RESULT,
        group_type=group_type,
        group_list_type=_COUNTS,
    )
    result: torch.Tensor = product
    return result
