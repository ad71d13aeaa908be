"""Gated delta rule through fla_npu's chunked kernels.

T tokens, N sequences, H query/key heads, U value heads, K key dim, V value dim. The kernels are fixed to K =
128, V = 128 or 256 and chunks of 64; smaller dims are padded with zeros, which changes nothing. Both releases
of fla_npu are used alike: query and key heads are repeated to the value heads, as v26.1.0 demands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from relax_npu.operators import delta_states
from relax_npu.operators.delta_kernels import run

if TYPE_CHECKING:
    from relax_kernels import CuSeqlens

KEY_DIM = 128
_NORM_EPS = 1e-6


def gated_delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    *,
    cu_seqlens: CuSeqlens,
    initial_state_NUKV: torch.Tensor | None,
    output_final_state: bool,
    qk_l2norm: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Serve `relax_kernels.gated_delta_rule`."""
    (_, heads, key_dim), (_, value_heads, value_dim) = q_THK.shape, v_TUV.shape
    if qk_l2norm:
        q_THK, k_THK = _normed(q_THK), _normed(k_THK)
    wide = 128 if value_dim <= 128 else 256
    pad_key, pad_value = (0, KEY_DIM - key_dim), (0, wide - value_dim)
    q, k = (F.pad(x.repeat_interleave(value_heads // heads, 1), pad_key) for x in (q_THK, k_THK))
    v = F.pad(v_TUV, pad_value)
    initial = initial_state_NUKV
    if initial is not None:
        initial = F.pad(initial, (*pad_value, *pad_key))
    tensors = (q, k, v, g_TU, beta_TU)
    has_states = initial is not None or output_final_state
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *_some(initial)))
    if has_states and wants_grad:
        o, final = delta_states.with_tokens_for_states(
            run, tensors, cu_seqlens, initial, output_final_state, scale
        )
    elif has_states:
        o, final = delta_states.with_kernel_states(tensors, cu_seqlens, initial, output_final_state, scale)
    else:
        o, final = run(*tensors, cu_seqlens, scale), None
    if final is not None:
        final = final[..., :key_dim, :value_dim].float()
    return o[..., :value_dim], final


def _some(x: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if x is None else (x,)


def _normed(x: torch.Tensor) -> torch.Tensor:
    exact = x.float()
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + _NORM_EPS)).to(x.dtype)
