"""Simulated operators of torch_npu: the rules of their documentation, and plain formulas in float32.

T, S tokens of queries and keys, H query heads, G key/value heads, D head dim or features, E experts.
"""

from __future__ import annotations

from typing import Any

import torch

from relax_npu.operators.typed import split
from relax_npu.simulation.registry import Kernel, require, require_dtype, require_shape

_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (*_HALF, torch.float32)
_MASK = 2048
_LANES = 8  # Maximum and sum of a softmax row are stored eight times.


def _rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    require_dtype("input", input, *_FLOATS)
    require_dtype("gamma", gamma, input.dtype)
    require_shape("gamma", gamma, input.shape[-1:])
    x = input.float()
    rstd = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x * rstd * gamma.float()).to(input.dtype), rstd


def _rms_norm_backward(
    dy: torch.Tensor, input: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    require_dtype("dy", dy, input.dtype)
    require_dtype("rstd", rstd, torch.float32)
    require_shape("rstd", rstd, (*input.shape[:-1], 1))
    require_shape("dy", dy, input.shape)
    normed, weighted = input.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    dgamma = (dy.float() * normed).flatten(0, -2).sum(0)
    return dx.to(input.dtype), dgamma


def _rotary_mul(
    input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", rotate: Any = None
) -> torch.Tensor:
    require(rotary_mode == "half", f"rotary_mode {rotary_mode!r} is not simulated")
    require_dtype("input", input, *_FLOATS)
    require(input.ndim == 4, f"input must have four axes, given {input.ndim}")
    for name, x in (("r1", r1), ("r2", r2)):
        require_dtype(name, x, input.dtype)
        require_shape(name, x, (1, input.shape[1], 1, input.shape[3]))
    features = input.shape[3]
    require(features % 2 == 0 and features <= 896, f"{features} features cannot be rotated")
    x = input.float()
    half = torch.cat((-x[..., features // 2 :], x[..., : features // 2]), -1)
    return (x * r1.float() + half * r2.float()).to(input.dtype)


def _swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    require_dtype("input", input, *_FLOATS)
    require(input.shape[dim] % 2 == 0, "the halved axis must be even")
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def _swiglu_backward(grad_output: torch.Tensor, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    require_dtype("grad_output", grad_output, input.dtype)
    (gate, up), dy = input.float().chunk(2, dim), grad_output.float()
    sigmoid = gate.sigmoid()
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((dgate, dy * gate * sigmoid), dim).to(input.dtype)


def _grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    group_list: torch.Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    **unused: Any,
) -> list[torch.Tensor]:
    require(not any(value is not None for value in unused.values()), "only plain products are simulated")
    require(len(x) == len(weight) == 1 and split_item in (2, 3), "one tensor each, one result")
    (rows,), (matrix,) = x, weight
    require_dtype("x", rows, *_HALF)
    require_dtype("weight", matrix, rows.dtype)
    require_dtype("group_list", group_list, torch.int64)
    counts = (
        group_list.tolist() if group_list_type == 1 else group_list.diff(prepend=group_list[:1] * 0).tolist()
    )
    if group_type == 0:
        require(matrix.ndim == 3 and matrix.shape[0] == len(counts), "weight must be [E, in, out]")
        require(sum(counts) == rows.shape[0], f"group_list counts {sum(counts)} rows of {rows.shape[0]}")
        parts = [part.float() @ w.float() for part, w in zip(split(rows, counts), matrix, strict=True)]
        return [torch.cat(parts).to(rows.dtype)]
    require(group_type == 2, f"group_type {group_type} is not simulated")
    require(rows.T.is_contiguous() and matrix.is_contiguous(), "x must be a transposed view, weight dense")
    require(sum(counts) == rows.shape[1] == matrix.shape[0], "group_list must count the summed axis")
    product = torch.full((len(counts), rows.shape[0], matrix.shape[1]), torch.nan)
    for e, (a, b) in enumerate(zip(split(rows, counts, 1), split(matrix, counts), strict=True)):
        if counts[e]:
            product[e] = a.float() @ b.float()
    return [product.to(rows.dtype)]


def _token_permute_grad(
    tokens: torch.Tensor,
    grad_permuted_tokens: torch.Tensor,
    indices: torch.Tensor,
    sorted_indices: torch.Tensor,
    padded_mode: bool = False,
) -> torch.Tensor:
    _require_rows(sorted_indices, grad_permuted_tokens)
    count, choices = indices.shape
    require(tokens.shape[0] == count, "indices must be [tokens, choices]")
    picked = grad_permuted_tokens.float()[sorted_indices.long()].view(count, choices, -1)
    return picked.sum(1).to(tokens.dtype)


def _require_rows(sorted_indices: torch.Tensor, rows: torch.Tensor) -> None:
    require_dtype("rows", rows, *_FLOATS)
    require_dtype("sorted_indices", sorted_indices, torch.int32)
    require_shape("sorted_indices", sorted_indices, (rows.shape[0],))


def _token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> torch.Tensor:
    _require_rows(sorted_indices, permuted_tokens)
    assert probs is not None
    require_dtype("probs", probs, permuted_tokens.dtype)
    picked = permuted_tokens.float()[sorted_indices.long()].view(*probs.shape, -1)
    return (picked * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)


def _token_unpermute_grad(
    permuted_tokens: torch.Tensor,
    grad_unpermuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _require_rows(sorted_indices, permuted_tokens)
    assert probs is not None
    rows, dy = sorted_indices.long(), grad_unpermuted_tokens.float()
    spread = (dy[:, None] * probs.float()[..., None]).flatten(0, 1)
    drows = torch.empty_like(permuted_tokens, dtype=torch.float32)
    drows[rows] = spread
    picked = permuted_tokens.float()[rows].view(*probs.shape, -1)
    dprobs = (picked * dy[:, None]).sum(-1)
    return drows.to(permuted_tokens.dtype), dprobs.to(probs.dtype)


def _attention_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: torch.Tensor | None,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
    keep_prob: float,
) -> list[tuple[slice, slice]]:
    """Checks a call of attention and returns the rows of each sequence's queries and keys."""
    require(input_layout == "TND", f"layout {input_layout} is not simulated")
    require(keep_prob == 1.0, "dropout is not simulated")
    require_dtype("query", query, *_FLOATS)
    for name, x in (("key", key), ("value", value)):
        require_dtype(name, x, query.dtype)
    require(query.shape[1] == head_num, f"head_num {head_num} is not the number of query heads")
    require(head_num % key.shape[1] == 0 and key.shape[:2] == value.shape[:2], "heads do not fit")
    require(query.shape[2] == key.shape[2] and query.shape[2] % 16 == 0, "head dims must agree, in sixteens")
    require(sparse_mode in (0, 3), f"sparse_mode {sparse_mode} is not simulated")
    if sparse_mode == 3:
        require(atten_mask is not None, "sparse_mode 3 needs the compressed mask")
        assert atten_mask is not None
        require_shape("atten_mask", atten_mask, (_MASK, _MASK))
        require_dtype("atten_mask", atten_mask, torch.bool, torch.uint8)
        expected = torch.ones(_MASK, _MASK, dtype=torch.bool).triu(1)
        require(bool((atten_mask.bool() == expected).all()), "the mask is True where a key is hidden")
    return list(zip(_rows(actual_seq_qlen, query), _rows(actual_seq_kvlen, key), strict=True))


def _rows(ends: list[int] | None, x: torch.Tensor) -> list[slice]:
    require(ends is not None and len(ends) > 0, "layout TND needs both lists of cumulative lengths")
    assert ends is not None
    whole = ends[:-1] if ends[-1] == 0 and len(ends) > 1 else ends
    # A pack with padding behind the last sequence says so by a trailing 0.
    require(ends[-1] == 0 or ends[-1] == x.shape[0], f"lengths end at {ends[-1]} of {x.shape[0]} tokens")
    starts = [0, *whole[:-1]]
    require(all(a <= b for a, b in zip(starts, whole, strict=True)), "lengths must be cumulative")
    return [slice(a, b) for a, b in zip(starts, whole, strict=True)]


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k_HSD = k.float().repeat_interleave(group, 1).transpose(0, 1)
    scores = q.float().transpose(0, 1) @ k_HSD.mT * scale
    if causal:
        n, m = scores.shape[1:]
        scores = scores.masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
    return scores


def _fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 0,
    next_tockens: int = 0,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    **unused: Any,
) -> tuple[Any, ...]:
    rows = _attention_inputs(
        *(query, key, value, head_num, input_layout, atten_mask),
        *(actual_seq_qlen, actual_seq_kvlen, sparse_mode, keep_prob),
    )
    out = torch.full_like(query, torch.nan)
    maximum = torch.full((*query.shape[:2], _LANES), torch.nan)
    total = torch.full_like(maximum, torch.nan)
    for qs, ks in rows:
        if qs.start == qs.stop:
            continue
        scores = _scores(query[qs], key[ks], scale, sparse_mode == 3)
        top = scores.amax(-1, keepdim=True)
        e = (scores - top).exp()
        v_HSD = value[ks].float().repeat_interleave(head_num // key.shape[1], 1).transpose(0, 1)
        out[qs] = (e / e.sum(-1, keepdim=True) @ v_HSD).transpose(0, 1).to(query.dtype)
        maximum[qs] = top.transpose(0, 1)
        total[qs] = e.sum(-1, keepdim=True).transpose(0, 1)
    return out, maximum, total, torch.empty(0), 0, 0, 0


def _fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor,
    softmax_sum: torch.Tensor,
    attention_in: torch.Tensor,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    **unused: Any,
) -> tuple[torch.Tensor, ...]:
    rows = _attention_inputs(
        *(query, key, value, head_num, input_layout, atten_mask),
        *(actual_seq_qlen, actual_seq_kvlen, sparse_mode, keep_prob),
    )
    for name, x in (("dy", dy), ("attention_in", attention_in)):
        require_dtype(name, x, query.dtype)
        require_shape(name, x, query.shape)
    for name, x in (("softmax_max", softmax_max), ("softmax_sum", softmax_sum)):
        require_dtype(name, x, torch.float32)
        require_shape(name, x, (*query.shape[:2], _LANES))
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value))
    groups = key.shape[1]
    for qs, ks in rows:
        if qs.start == qs.stop:
            continue
        scores = _scores(query[qs], key[ks], scale_value, sparse_mode == 3)
        normal = softmax_max[qs, :, :1] + softmax_sum[qs, :, :1].log()
        p = (scores - normal.transpose(0, 1)).exp()
        do_HTD = dy[qs].float().transpose(0, 1)
        spread = [
            x[ks].float().repeat_interleave(head_num // groups, 1).transpose(0, 1) for x in (key, value)
        ]
        delta = (do_HTD * attention_in[qs].float().transpose(0, 1)).sum(-1, keepdim=True)
        ds = p * (do_HTD @ spread[1].mT - delta) * scale_value
        dq[qs] = (ds @ spread[0]).transpose(0, 1)
        for target, x in ((dk, ds.mT @ query[qs].float().transpose(0, 1)), (dv, p.mT @ do_HTD)):
            target[ks] = x.view(groups, -1, *x.shape[1:]).sum(1).transpose(0, 1)
    none = torch.empty(0)
    return *(x.to(query.dtype) for x in (dq, dk, dv)), none, none


KERNELS: dict[str, Kernel] = {
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_rotary_mul": _rotary_mul,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_moe_token_permute_grad": _token_permute_grad,
    "npu_moe_token_unpermute": _token_unpermute,
    "npu_moe_token_unpermute_grad": _token_unpermute_grad,
    "npu_fusion_attention": _fusion_attention,
    "npu_fusion_attention_grad": _fusion_attention_grad,
}
