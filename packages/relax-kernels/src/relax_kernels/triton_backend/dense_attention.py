"""Causal attention in sequences of one length through cuDNN, which outruns flash attention at head dim 256.

N sequences, L tokens of each, T = N L, H query heads, G key/value heads, D head dim. cuDNN takes [N, H, L, D]
and plans for each shape anew, which takes longer than it saves in a call: lengths are rounded up by at most a
sixteenth, so that few shapes occur. Under the causal mask no token sees the padding behind it. cuDNN's form
for sequences of any lengths is not used: in torch 2.11 its gradients are NaN or it fails.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.triton_backend.jit import apply

LEAST_TOKENS, SHORTEST = 4096, 2048
"""Tokens in all and of a sequence from which cuDNN is the faster one."""


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NHLD: torch.Tensor, k_NGLD: torch.Tensor, v_NGLD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keep = any(ctx.needs_input_grad)
        o_NHLD: torch.Tensor
        o_NHLD, lse, _, _, length_q, length_k, seed, offset, _ = (
            torch.ops.aten._scaled_dot_product_cudnn_attention(
                q_NHLD, k_NGLD, v_NGLD, None, keep, 0.0, True, False, scale=scale
            )
        )
        if keep:
            ctx.save_for_backward(q_NHLD, k_NGLD, v_NGLD, o_NHLD, lse, seed, offset)
            ctx.options = (length_q, length_k, scale)
        return o_NHLD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_NHLD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        length_q, length_k, scale = ctx.options
        o_NHLD = ctx.saved_tensors[3]
        if do_NHLD.stride() != o_NHLD.stride():
            # torch keeps plans by the shapes and strides of q, k and v alone: one made for other strides of
            # the output's gradient would read it wrongly.
            do_NHLD = torch.empty_like(o_NHLD).copy_(do_NHLD)
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do_NHLD, *ctx.saved_tensors, None, None, None, length_q, length_k, 0.0, True, scale=scale
        )
        return *gradients, None


def serves(lengths_q: CuSeqlens, lengths_k: CuSeqlens, head_dim: int, *, causal: bool, lse: bool) -> bool:
    """Tell whether a call is one for cuDNN: causal, of one length, and where it is faster.

    Its backward pass does not give the same bits again, which flash attention's does when torch is told so.
    """
    return (
        causal
        and not lse
        and head_dim > 128
        and lengths_q.total >= LEAST_TOKENS
        and min(lengths_q.lengths) == lengths_q.max_length >= SHORTEST
        and lengths_q == lengths_k
        and not torch.are_deterministic_algorithms_enabled()
    )


def dense_attention(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, *, sequences: int, scale: float
) -> torch.Tensor:
    """Output [T, H, D] of causal attention in `sequences` of equal length."""
    length = len(q_THD) // sequences
    padding = (0, 0, 0, 0, 0, rounded(length) - length)
    batch = []
    for x_THD in (q_THD, k_TGD, v_TGD):
        x_NLHD = x_THD.reshape(sequences, length, *x_THD.shape[1:])
        batch.append((F.pad(x_NLHD, padding) if padding[-1] else x_NLHD).transpose(1, 2))
    o_NHLD: torch.Tensor = apply(_DenseAttention, *batch, scale)
    return o_NHLD[:, :, :length].transpose(1, 2).reshape(q_THD.shape)


def rounded(length: int) -> int:
    """The length rounded up to one of at most 16 between a power of two and the next."""
    unit = 1 << max(length.bit_length() - 5, 0)
    return -(-length // unit) * unit
