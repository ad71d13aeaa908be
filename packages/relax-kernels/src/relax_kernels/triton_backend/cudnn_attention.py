"""Attention of packed sequences over themselves by cuDNN, through torch: on Hopper about twice as fast as the
flash attention that torch carries.

T tokens, N sequences, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.triton_backend.jit import apply

_CAPABILITIES = (9, 10)


def serves(q_THD: torch.Tensor, lengths_q: CuSeqlens, lengths_k: CuSeqlens, return_lse: bool) -> bool:
    """Whether a call can go to cuDNN.

    Its causal mask is aligned to the sequences' starts, its backward pass adds in any order, and it has no
    gradient of the log-sum-exp.
    """
    return (
        not return_lse
        and lengths_q.host == lengths_k.host
        and torch.cuda.get_device_capability(q_THD.device)[0] in _CAPABILITIES
        and torch.backends.cudnn.enabled
        and not torch.are_deterministic_algorithms_enabled()
    )


def _bucket(size: int, least: int) -> int:
    """Return the next power of two: cuDNN plans, which takes it long, for every size that it meets."""
    return max(least, 1 << (size - 1).bit_length())


def _ends(lengths: CuSeqlens, device: torch.device) -> torch.Tensor:
    """Return the cumulative lengths, with empty sequences behind until their number is a power of two."""

    def build() -> torch.Tensor:
        missing = _bucket(len(lengths), 1) - len(lengths)
        ends = (*lengths.host, *[lengths.total] * missing)
        return torch.tensor(ends, dtype=torch.int32).to(device)

    return lengths.table(("cudnn_ends", device), build)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        lengths: CuSeqlens,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        ends = _ends(lengths, q_THD.device)
        longest = _bucket(lengths.max_length, 128)
        # The backward operator takes a tensor that only autograd can leave out: so autograd calls it.
        inputs = [x.detach().contiguous() for x in (q_THD, k_TGD, v_TGD)]
        differentiable = any(ctx.needs_input_grad)
        with torch.set_grad_enabled(differentiable):
            for tensor in inputs:
                tensor.requires_grad_(differentiable)
            o_THD: torch.Tensor = torch.ops.aten._cudnn_attention_forward(
                *inputs, None, ends, ends, longest, longest, differentiable, 0.0, causal, False, scale=scale
            )[0]
        ctx.inner = (o_THD, inputs)
        return o_THD.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        o_THD, inputs = ctx.inner
        del ctx.inner
        return *torch.autograd.grad(o_THD, inputs, do_THD.contiguous()), None, None, None


def cudnn_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    *,
    lengths: CuSeqlens,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Return o_THD; for calls that `serves` accepts."""
    o_THD: torch.Tensor = apply(_Attention, q_THD, k_TGD, v_TGD, lengths, causal, scale)
    return o_THD
