"""Gated delta rule, one token at a time: the formula as it is written.

N sequences, H query/key heads, U value heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.torch_backend.typed import accumulation_dtype

L2_EPS = 1e-6


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(sum x^2 + 1e-6) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def gated_delta_rule_step(
    q_NHK: torch.Tensor,
    k_NHK: torch.Tensor,
    v_NUV: torch.Tensor,
    g_NU: torch.Tensor,
    beta_NU: torch.Tensor,
    state_NUKV: torch.Tensor,
    *,
    qk_l2norm: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `relax_kernels.gated_delta_rule_step`."""
    working = accumulation_dtype(q_NHK.dtype)
    q, k, v, g, beta, state = (x.to(working) for x in (q_NHK, k_NHK, v_NUV, g_NU, beta_NU, state_NUKV))
    if qk_l2norm:
        q, k = l2_normalise(q), l2_normalise(k)
    heads_per_key = v.shape[1] // q.shape[1]
    q_NUK = (q * scale).repeat_interleave(heads_per_key, dim=1)
    k_NUK = k.repeat_interleave(heads_per_key, dim=1)
    state = state * g.exp()[..., None, None]
    recalled_NUV = torch.einsum("nuk,nukv->nuv", k_NUK, state)
    delta_NUV = (v - recalled_NUV) * beta[..., None]
    state = state + k_NUK[..., :, None] * delta_NUV[..., None, :]
    o_NUV = torch.einsum("nuk,nukv->nuv", q_NUK, state)
    return o_NUV.to(q_NHK.dtype), state.to(state_NUKV.dtype)


def naive_gated_delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    *,
    cu_seqlens: CuSeqlens,
    initial_state_NUKV: torch.Tensor | None = None,
    output_final_state: bool = False,
    qk_l2norm: bool = True,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`relax_kernels.gated_delta_rule` by a loop over tokens: what the formula means, and what the tests
    trust.

    Slow; differentiable by autograd.
    """
    working = accumulation_dtype(q_THK.dtype)
    scale = q_THK.shape[-1] ** -0.5 if scale is None else scale
    outputs, states = [v_TUV[:0]], []
    for index, (start, end) in enumerate(zip(cu_seqlens.host, cu_seqlens.host[1:], strict=False)):
        if initial_state_NUKV is None:
            state = q_THK.new_zeros(1, v_TUV.shape[1], q_THK.shape[2], v_TUV.shape[2], dtype=working)
        else:
            state = initial_state_NUKV[index : index + 1].to(working)
        for t in range(start, end):
            q, k, v, g, beta = (x[t : t + 1] for x in (q_THK, k_THK, v_TUV, g_TU, beta_TU))
            o_1UV, state = gated_delta_rule_step(q, k, v, g, beta, state, qk_l2norm=qk_l2norm, scale=scale)
            outputs.append(o_1UV)
        states.append(state)
    final = None
    if output_final_state:
        final = torch.cat(states) if states else v_TUV.new_zeros(0, *v_TUV.shape[1:], dtype=working)
    return torch.cat(outputs), final
