"""Mixture of experts in plain torch: one matrix product per expert, gathers in both directions.

T tokens, E experts, K experts of each token, P = T * K rows sorted by expert, D features in, F features out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from relax_kernels.ops.experts import Permutation
from relax_kernels.torch_backend.typed import accumulation_dtype, apply


def router_topk(logits_TE: torch.Tensor, *, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `relax_kernels.router_topk`."""
    p_TE = torch.softmax(logits_TE, -1, dtype=accumulation_dtype(logits_TE.dtype))
    # A stable sort, because topk may take equal logits in any order.
    expert_TK = logits_TE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weight_TK = p_TE.gather(1, expert_TK)
    if normalise:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return weight_TK, expert_TK


def sort_by_expert(
    expert_TK: torch.Tensor, *, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `relax_kernels.sort_by_expert`."""
    flat = expert_TK.reshape(-1)
    choice_P = flat.argsort(stable=True)
    row_TK = torch.empty_like(flat).scatter_(0, choice_P, torch.arange(len(flat), device=flat.device))
    count_E = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    count_E.scatter_add_(0, flat, torch.ones_like(flat))
    return row_TK.view_as(expert_TK), choice_P // max(1, expert_TK.shape[1]), count_E


def permute_tokens(x_TD: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """See `relax_kernels.permute_tokens`."""
    x_PD: torch.Tensor = apply(_Permute, x_TD, permutation)
    return x_PD


def unpermute_tokens(y_PD: torch.Tensor, permutation: Permutation, weight_TK: torch.Tensor) -> torch.Tensor:
    """See `relax_kernels.unpermute_tokens`."""
    y_TD: torch.Tensor = apply(_Unpermute, y_PD, weight_TK, permutation)
    return y_TD


def grouped_matmul(x_PD: torch.Tensor, weight_EFD: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
    """See `relax_kernels.grouped_matmul`."""
    y_PF: torch.Tensor = apply(_GroupedMatmul, x_PD, weight_EFD, count_E)
    return y_PF


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, permutation: Permutation) -> torch.Tensor:
        ctx.save_for_backward(permutation.row_TK)
        return x_TD.index_select(0, permutation.token_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_PD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        dx_TD = dx_PD[row_TK].sum(1, dtype=accumulation_dtype(dx_PD.dtype))
        return dx_TD.to(dx_PD.dtype), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_PD: torch.Tensor, weight_TK: torch.Tensor, permutation: Permutation
    ) -> torch.Tensor:
        ctx.save_for_backward(y_PD, weight_TK, *permutation)
        working = accumulation_dtype(y_PD.dtype)
        weight_T1K = weight_TK.to(working).unsqueeze(1)
        return torch.bmm(weight_T1K, y_PD[permutation.row_TK].to(working)).squeeze(1).to(y_PD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y_PD, weight_TK, row_TK, token_P, _ = ctx.saved_tensors
        dy = dy_TD.to(accumulation_dtype(y_PD.dtype))
        weight_P1 = torch.empty_like(token_P, dtype=dy.dtype).scatter_(
            0, row_TK.reshape(-1), weight_TK.reshape(-1).to(dy.dtype)
        )[:, None]
        dy_PD = (dy[token_P] * weight_P1).to(y_PD.dtype)
        dweight_TK = torch.bmm(y_PD[row_TK].to(dy.dtype), dy.unsqueeze(-1)).squeeze(-1)
        return dy_PD, dweight_TK.to(weight_TK.dtype), None


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PD: torch.Tensor, weight_EFD: torch.Tensor, count_E: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_PD, weight_EFD, count_E)
        working = accumulation_dtype(x_PD.dtype)
        y_PF = x_PD.new_empty(x_PD.shape[0], weight_EFD.shape[1])
        for expert, rows in _groups(count_E):
            y_PF[rows] = (x_PD[rows].to(working) @ weight_EFD[expert].to(working).T).to(y_PF.dtype)
        return y_PF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_PF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_PD, weight_EFD, count_E = ctx.saved_tensors
        working = accumulation_dtype(x_PD.dtype)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx_PD = torch.empty_like(x_PD) if needs_x else None
        dweight_EFD = torch.zeros_like(weight_EFD) if needs_weight else None
        for expert, rows in _groups(count_E):
            dy = dy_PF[rows].to(working)
            if dx_PD is not None:
                dx_PD[rows] = (dy @ weight_EFD[expert].to(working)).to(dx_PD.dtype)
            if dweight_EFD is not None:
                dweight_EFD[expert] = (dy.T @ x_PD[rows].to(working)).to(dweight_EFD.dtype)
        return dx_PD, dweight_EFD, None


def _groups(count_E: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and the rows."""
    start = 0
    for expert, count in enumerate(count_E.tolist()):
        if count:
            yield expert, slice(start, start + count)
        start += count
