"""Gated delta rule: the linear-attention recurrence of Qwen3.5's delta-net layers.

T tokens, N sequences, H query/key heads, U value heads (U % H == 0), K key dim, V value dim.
"""

from __future__ import annotations

import torch

from relax_kernels.check import Checker
from relax_kernels.contract import Call
from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.registry import implementation


def gated_delta_rule(
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
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the gated delta rule over packed sequences; differentiable in every tensor.

    Per sequence and value head u (which reads key head u // (U // H)), with S a K x V matrix that starts as
    the initial state or 0, for each token t in order:

        S = exp(g_t) S;  S = S + k_t (beta_t (v_t - S^T k_t))^T;  o_t = scale * S^T q_t

    Source: Yang et al., Gated Delta Networks, arXiv 2412.06464; equal to transformers' Qwen3.5 functions.

    Args:
        q_THK: queries. k_THK and v_TUV have the same dtype.
        k_THK: keys.
        v_TUV: values.
        g_TU: logarithm of the decay, <= 0 and finite; any float dtype (float32 recommended).
        beta_TU: step size, in [0, 1]; any float dtype.
        cu_seqlens: lengths of the N sequences; empty ones are allowed.
        initial_state_NUKV: S before the first token of each sequence.
        output_final_state: also return S after the last token.
        qk_l2norm: replace q and k by x / sqrt(sum x^2 + 1e-6) first.
        scale: factor on q; None means K ** -0.5.
        backend: name of the backend to use; None lets the registry choose.

    Returns:
        o_TUV in q's dtype, and the final states (float32; float64 for float64 inputs) or None.

    Raises:
        InvalidInput: shapes, dtypes, devices or lengths do not fit together.
        NoBackend: no backend serves the call.
    """
    call = delta_rule_call(
        q_THK,
        k_THK,
        v_TUV,
        g_TU,
        beta_TU,
        cu_seqlens=cu_seqlens,
        initial_state_NUKV=initial_state_NUKV,
        output_final_state=output_final_state,
        qk_l2norm=qk_l2norm,
        scale=scale,
    )
    result: tuple[torch.Tensor, torch.Tensor | None] = implementation(call, backend)(
        q_THK,
        k_THK,
        v_TUV,
        g_TU,
        beta_TU,
        cu_seqlens=cu_seqlens,
        initial_state_NUKV=initial_state_NUKV,
        output_final_state=output_final_state,
        qk_l2norm=qk_l2norm,
        scale=q_THK.shape[-1] ** -0.5 if scale is None else scale,
    )
    return result


def delta_rule_call(
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
) -> Call:
    """Check the inputs of `gated_delta_rule` and describe the call."""
    check = Checker("gated_delta_rule")
    check.tensor("q_THK", q_THK, "THK")
    check.tensor("k_THK", k_THK, "THK", same_dtype_as=q_THK)
    check.tensor("v_TUV", v_TUV, "TUV", same_dtype_as=q_THK)
    check.tensor("g_TU", g_TU, "TU")
    check.tensor("beta_TU", beta_TU, "TU")
    check.multiple("U", "H")
    _check_scale(check, scale)
    check.flags(output_final_state=output_final_state, qk_l2norm=qk_l2norm)
    check.lengths("cu_seqlens", cu_seqlens, "T")
    check.bind("N", len(cu_seqlens), "cu_seqlens")
    tensors = [q_THK, k_THK, v_TUV, g_TU, beta_TU]
    if initial_state_NUKV is not None:
        check.tensor("initial_state_NUKV", initial_state_NUKV, "NUKV")
        tensors.append(initial_state_NUKV)
    options = {
        "output_final_state": output_final_state,
        "qk_l2norm": qk_l2norm,
        "scale": scale,
        "has_initial_state": initial_state_NUKV is not None,
    }
    return check.call(tensors, options, cu_seqlens)


def gated_delta_rule_step(
    q_NHK: torch.Tensor,
    k_NHK: torch.Tensor,
    v_NUV: torch.Tensor,
    g_NU: torch.Tensor,
    beta_NU: torch.Tensor,
    state_NUKV: torch.Tensor,
    *,
    qk_l2norm: bool = True,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance N sequences by one token each (decoding); formula and arguments as `gated_delta_rule`.

    Returns o_NUV in q's dtype and the new states in the dtype of the given ones (float32 recommended). The
    given states are not changed. No backward pass is promised.
    """
    call = delta_rule_step_call(
        q_NHK, k_NHK, v_NUV, g_NU, beta_NU, state_NUKV, qk_l2norm=qk_l2norm, scale=scale
    )
    result: tuple[torch.Tensor, torch.Tensor] = implementation(call, backend)(
        q_NHK,
        k_NHK,
        v_NUV,
        g_NU,
        beta_NU,
        state_NUKV,
        qk_l2norm=qk_l2norm,
        scale=q_NHK.shape[-1] ** -0.5 if scale is None else scale,
    )
    return result


def delta_rule_step_call(
    q_NHK: torch.Tensor,
    k_NHK: torch.Tensor,
    v_NUV: torch.Tensor,
    g_NU: torch.Tensor,
    beta_NU: torch.Tensor,
    state_NUKV: torch.Tensor,
    *,
    qk_l2norm: bool = True,
    scale: float | None = None,
) -> Call:
    """Check the inputs of `gated_delta_rule_step` and describe the call."""
    check = Checker("gated_delta_rule_step")
    check.tensor("q_NHK", q_NHK, "NHK")
    check.tensor("k_NHK", k_NHK, "NHK", same_dtype_as=q_NHK)
    check.tensor("v_NUV", v_NUV, "NUV", same_dtype_as=q_NHK)
    check.tensor("g_NU", g_NU, "NU")
    check.tensor("beta_NU", beta_NU, "NU")
    check.multiple("U", "H")
    _check_scale(check, scale)
    check.flags(qk_l2norm=qk_l2norm)
    check.tensor("state_NUKV", state_NUKV, "NUKV")
    options = {"qk_l2norm": qk_l2norm, "scale": scale}
    return check.call([q_NHK, k_NHK, v_NUV, g_NU, beta_NU, state_NUKV], options)


def _check_scale(check: Checker, scale: float | None) -> None:
    """K ** -0.5 needs a K."""
    check.positive("K")
    if scale is not None:
        check.number("scale", scale)
