"""Full attention over packed sequences.

T query tokens, S key tokens, N sequences, H query heads, G key/value heads (H % G == 0), D head dim, E value
dim.
"""

from __future__ import annotations

import torch

from relax_kernels.check import Checker
from relax_kernels.contract import Call
from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.registry import implementation


def attention(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGE: torch.Tensor,
    *,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each sequence's queries over its own keys; differentiable in q, k and v.

    Query head h reads key/value head h // (H // G). With causal=True the last query of a sequence is aligned
    with its last key: query i of n sees key j of m when j <= i + m - n. A query that sees no key gives 0 and
    a log-sum-exp of minus infinity.

    Args:
        q_THD: queries.
        k_SGD: keys, q's dtype.
        v_SGE: values, q's dtype.
        cu_seqlens_q: lengths of the N query sequences; empty ones are allowed.
        cu_seqlens_k: lengths of the N key sequences; None means as the queries'.
        causal: whether a query sees only keys up to its own place.
        scale: factor on the scores; None means D ** -0.5.
        return_lse: also return log(sum over keys of exp(score)), with which partial results over disjoint
            sets of keys can be merged exactly; gradients flow through it.
        backend: name of the backend to use; None lets the registry choose.

    Returns:
        o_THE in q's dtype; with return_lse also lse_TH (float32; float64 for float64 inputs).

    Raises:
        InvalidInput: shapes, dtypes, devices or lengths do not fit together.
        NoBackend: no backend serves the call.
    """
    call = attention_call(
        q_THD,
        k_SGD,
        v_SGE,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        causal=causal,
        scale=scale,
        return_lse=return_lse,
    )
    o_THE, lse_TH = implementation(call, backend)(
        q_THD,
        k_SGD,
        v_SGE,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
        causal=causal,
        scale=q_THD.shape[-1] ** -0.5 if scale is None else scale,
        return_lse=return_lse,
    )
    return (o_THE, lse_TH) if return_lse else o_THE


def attention_call(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGE: torch.Tensor,
    *,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
) -> Call:
    """Check the inputs of `attention` and describe the call."""
    check = Checker("attention")
    check.tensor("q_THD", q_THD, "THD")
    check.tensor("k_SGD", k_SGD, "SGD", same_dtype_as=q_THD)
    check.tensor("v_SGE", v_SGE, "SGE", same_dtype_as=q_THD)
    check.multiple("H", "G")
    check.positive("D")
    if scale is not None:
        check.number("scale", scale)
    check.flags(causal=causal, return_lse=return_lse)
    check.lengths("cu_seqlens_q", cu_seqlens_q, "T")
    keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check.lengths("cu_seqlens_k" if cu_seqlens_k is not None else "cu_seqlens_q", keys, "S")
    check.require(
        len(keys) == len(cu_seqlens_q),
        f"cu_seqlens_q has {len(cu_seqlens_q)} sequences, cu_seqlens_k has {len(keys)}; they must be as many",
    )
    check.bind("N", len(cu_seqlens_q), "cu_seqlens_q")
    options = {"causal": causal, "scale": scale, "return_lse": return_lse, "cu_seqlens_k": keys}
    return check.call([q_THD, k_SGD, v_SGE], options, cu_seqlens_q)
