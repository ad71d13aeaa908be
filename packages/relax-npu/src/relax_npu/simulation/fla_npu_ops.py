"""Simulated operators of fla_npu: its rules for layout, dtype and length, and plain formulas in float32.

B = 1 pack, H key heads, U value heads, T tokens, K = 128 key dim, V value dim, C tokens of a chunk, W taps.
The formulas are those of the chunked gated delta rule (Yang et al., arXiv 2412.06464) chunk by chunk, each
gradient written out, so that a wrong order, transpose or sign in the caller shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from relax_npu.simulation.registry import Kernel, require, require_dtype, require_shape

_HALF = (torch.bfloat16, torch.float16)
_KEY_DIM = 128
_VALUE_DIMS = (128, 256)
Ints = list[int] | None


def _chunks(T: int, chunk_size: int, cu_seqlens: Ints, chunk_indices: Ints) -> list[tuple[int, slice]]:
    """Checks the two lists and returns (sequence, rows) of each chunk."""
    require(chunk_size in (64, 128), f"chunk_size must be 64 or 128, given {chunk_size}")
    require(cu_seqlens is not None and chunk_indices is not None, "packs need both lists of numbers")
    assert cu_seqlens is not None
    assert chunk_indices is not None
    require(cu_seqlens[0] == 0 and cu_seqlens[-1] == T, f"cu_seqlens must run from 0 to {T}")
    require(all(a < b for a, b in pairwise(cu_seqlens)), "no empty sequence")
    expected, rows = [], []
    for n, (start, end) in enumerate(pairwise(cu_seqlens)):
        for index, first in enumerate(range(start, end, chunk_size)):
            expected += [n, index]
            rows.append((n, slice(first, min(first + chunk_size, end))))
    require(chunk_indices == expected, "chunk_indices must list (sequence, chunk) of every chunk")
    return rows


def _heads(name: str, x: torch.Tensor, like: torch.Tensor, *last: int) -> None:
    """Requires [1, heads, T, ...] with the heads and tokens of another."""
    require_shape(name, x, (1, like.shape[1], like.shape[2], *last))


def _inputs(k: torch.Tensor, v: torch.Tensor, **exact: torch.Tensor | None) -> None:
    """Requires k and v of equal heads (the stricter release's rule) and the others as [1, U, T] float32."""
    require(k.ndim == 4 and k.shape[0] == 1, f"k must be [1, heads, T, K], given {tuple(k.shape)}")
    require(k.shape[3] == _KEY_DIM, f"K must be {_KEY_DIM}, given {k.shape[3]}")
    require(v.shape[3] in _VALUE_DIMS, f"V must be one of {_VALUE_DIMS}, given {v.shape[3]}")
    require_dtype("k", k, *_HALF)
    require_dtype("v", v, k.dtype)
    require(k.is_contiguous(), "k must be contiguous")
    _heads("v", v, k, v.shape[3])
    for name, x in exact.items():
        assert x is not None
        require_dtype(name, x, torch.float32)
        _heads(name, x, k)


def _recompute_w_u(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    chunk_size: int,
    *,
    g: torch.Tensor | None = None,
    gk: Any = None,
    cu_seqlens: Ints = None,
    chunk_indices: Ints = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert g is not None
    _inputs(k, v, beta=beta, g=g)
    require_dtype("A", A, k.dtype)
    _heads("A", A, k, chunk_size)
    w, u = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    for _, rows in _chunks(k.shape[2], chunk_size, cu_seqlens, chunk_indices):
        size = rows.stop - rows.start
        a = A[0, :, rows, :size].float()
        weighted = k[0, :, rows].float() * (beta * g.exp())[0, :, rows, None]
        w[0, :, rows] = (a @ weighted).to(k.dtype)
        u[0, :, rows] = (a @ (v[0, :, rows].float() * beta[0, :, rows, None])).to(v.dtype)
    return w, u


def _fwd_h(
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor | None = None,
    *,
    gk: Any = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    save_new_value: bool = True,
    cu_seqlens: Ints = None,
    chunk_indices: Ints = None,
    use_exp2: bool = False,
    transpose_state_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    require(g is not None, "g cannot be None")
    require(gk is None and save_new_value and not use_exp2 and not transpose_state_layout, "reserved")
    assert g is not None
    _inputs(k, u, g=g)
    _heads("w", w, k, _KEY_DIM)
    rows_of = _chunks(k.shape[2], chunk_size, cu_seqlens, chunk_indices)
    assert cu_seqlens is not None
    U, V, sequences = u.shape[1], u.shape[3], len(cu_seqlens) - 1
    if initial_state is not None:
        require_shape("initial_state", initial_state, (sequences, U, _KEY_DIM, V))
    states = (
        torch.zeros(sequences, U, _KEY_DIM, V) if initial_state is None else initial_state.float().clone()
    )
    h = torch.zeros(1, U, len(rows_of), _KEY_DIM, V, dtype=k.dtype)
    v_new = torch.full_like(u, torch.nan)
    for index, (n, rows) in enumerate(rows_of):
        h[0, :, index] = states[n].to(k.dtype)
        new = u[0, :, rows].float() - w[0, :, rows].float() @ states[n]
        v_new[0, :, rows] = new.to(u.dtype)
        decay = g[0, :, rows]
        kept = k[0, :, rows].float() * (decay[:, -1:] - decay).exp()[..., None]
        states[n] = states[n] * decay[:, -1, None, None].exp() + kept.mT @ new
    final_dtype = k.dtype if initial_state is None else initial_state.dtype
    return h, v_new, states.to(final_dtype) if output_final_state else torch.empty(1, dtype=k.dtype)


def _within(decay: torch.Tensor, *, diagonal: int = 0) -> torch.Tensor:
    """exp(decay_i - decay_j) on and below a diagonal, 0 above."""
    size = decay.shape[-1]
    seen = torch.ones(size, size, dtype=torch.bool).tril(diagonal)
    return (decay[..., :, None] - decay[..., None, :]).masked_fill(~seen, -torch.inf).exp()


def _each(
    g: torch.Tensor, chunk_size: int, cu_seqlens: Ints, chunk_indices: Ints
) -> Iterator[tuple[int, int, slice, torch.Tensor]]:
    """Yields (place of the chunk, sequence, rows, decay of the rows)."""
    for index, (n, rows) in enumerate(_chunks(g.shape[2], chunk_size, cu_seqlens, chunk_indices)):
        yield index, n, rows, g[0, :, rows]


def _fwd_o(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    h: torch.Tensor,
    scale: float,
    *,
    g: torch.Tensor | None = None,
    g_gamma: Any = None,
    cu_seqlens: Ints = None,
    chunk_indices: Ints = None,
    chunk_size: int = 64,
    transpose_state_layout: bool = False,
) -> torch.Tensor:
    assert g is not None
    _inputs(k, v, g=g)
    _heads("q", q, k, _KEY_DIM)
    o = torch.full_like(v, torch.nan)
    for index, _, rows, decay in _each(g, chunk_size, cu_seqlens, chunk_indices):
        qc, kc, vc = (x[0, :, rows].float() for x in (q, k, v))
        before = (qc * decay.exp()[..., None]) @ h[0, :, index].float()
        o[0, :, rows] = (scale * (before + (qc @ kc.mT * _within(decay)) @ vc)).to(v.dtype)
    return o


def _bwd_dv_local(
    q: torch.Tensor,
    k: torch.Tensor,
    d_o: torch.Tensor,
    g: torch.Tensor,
    scale: float,
    chunk_size: int,
    *,
    g_gamma: Any = None,
    A: Any = None,
    cu_seqlens: Ints = None,
    chunk_indices: Ints = None,
) -> torch.Tensor:
    _inputs(k, d_o, g=g)
    dv = torch.full_like(d_o, torch.nan)
    for _, _, rows, decay in _each(g, chunk_size, cu_seqlens, chunk_indices):
        qc, kc, do = (x[0, :, rows].float() for x in (q, k, d_o))
        dv[0, :, rows] = ((qc @ kc.mT * _within(decay) * scale).mT @ do).to(dv.dtype)
    return dv


def _bwd_dhu(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    d_o: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    chunk_size: int,
    *,
    g: torch.Tensor | None = None,
    gK: Any = None,
    h0: Any = None,
    dht: Any = None,
    cu_seqlens: Ints = None,
    chunk_indices: Ints = None,
    use_exp2: bool = False,
    transpose_state_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert g is not None
    require(h0 is None and dht is None, "states have no gradient in these kernels")
    _inputs(k, dv, g=g)
    _heads("w", w, k, _KEY_DIM)
    chunks = list(_each(g, chunk_size, cu_seqlens, chunk_indices))
    U, V = dv.shape[1], dv.shape[3]
    dh = torch.full((1, U, len(chunks), _KEY_DIM, V), torch.nan, dtype=q.dtype)
    dv2 = torch.full_like(dv, torch.nan)
    state, last_sequence = torch.zeros(U, _KEY_DIM, V), -1
    for index, n, rows, decay in reversed(chunks):
        if n != last_sequence:
            state, last_sequence = torch.zeros_like(state), n
        dh[0, :, index] = state.to(q.dtype)
        qc, kc, wc, do = (x[0, :, rows].float() for x in (q, k, w, d_o))
        kept = (kc @ state) * (decay[:, -1:] - decay).exp()[..., None]
        new = kept + dv[0, :, rows].float()
        dv2[0, :, rows] = new.to(dv.dtype)
        from_o = (qc * (decay.exp() * scale)[..., None]).mT @ do
        state = state * decay[:, -1, None, None].exp() + from_o - wc.mT @ new
    return dh, torch.empty(0, dtype=q.dtype), dv2


def _bwd_dqkwg(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    h: torch.Tensor,
    dox: torch.Tensor,
    dh: torch.Tensor,
    dv: torch.Tensor,
    chunk_size: int,
    *,
    cu_seqlens: Ints = None,
    chunk_indices: Ints = None,
    w: Any = None,
    g_gamma: Any = None,
    scale: float | None = None,
    use_exp2: Any = None,
    transpose_state_layout: Any = None,
) -> tuple[torch.Tensor, ...]:
    _inputs(k, v, g=g)
    assert scale is not None
    dq, dk, dw = (torch.full_like(k, torch.nan) for _ in range(3))
    dg = torch.full_like(g, torch.nan)
    for index, _, rows, decay in _each(g, chunk_size, cu_seqlens, chunk_indices):
        qc, kc, vc, do, dvc = (x[0, :, rows].float() for x in (q, k, v, dox, dv))
        hc, dhc = h[0, :, index].float(), dh[0, :, index].float()
        ds = (do @ vc.mT) * _within(decay) * scale
        dq_c = scale * decay.exp()[..., None] * (do @ hc.mT) + ds @ kc
        dk_state = (decay[:, -1:] - decay).exp()[..., None] * (vc @ dhc.mT)
        dk_c = dk_state + ds.mT @ qc
        dg_c = (dq_c * qc).sum(-1) - (dk_c * kc).sum(-1)
        at_end = (hc * dhc).sum((-2, -1)) * decay[:, -1].exp() + (dk_state * kc).sum((-2, -1))
        dg_c[:, -1] += at_end
        for target, value in ((dq, dq_c), (dk, dk_c), (dw, -(dvc @ hc.mT)), (dg, dg_c)):
            target[0, :, rows] = value.to(target.dtype)
    return dq, dk, dw, dg


def _wy_bwd_da(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    dw: torch.Tensor,
    du: torch.Tensor,
    g: torch.Tensor,
    *,
    chunk_size: int,
    cu_seqlens: Ints = None,
    chunk_indices: Ints = None,
) -> torch.Tensor:
    _inputs(k, v, beta=beta, g=g)
    dA = torch.zeros_like(A)
    for _, _, rows, decay in _each(g, chunk_size, cu_seqlens, chunk_indices):
        size = rows.stop - rows.start
        kc, vc, dwc, duc, a = (x[0, :, rows].float() for x in (k, v, dw, du, A))
        a, b = a[..., :size], beta[0, :, rows, None]
        d_inverse = dwc @ (kc * b * decay.exp()[..., None]).mT + duc @ (vc * b).mT
        d_lower = -(a.mT @ d_inverse @ a.mT) * _within(decay, diagonal=-1)
        dA[0, :, rows, :size] = d_lower.to(dA.dtype)
    return dA


def _wy_bwd_full(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    dA: torch.Tensor,
    dw: torch.Tensor,
    du: torch.Tensor,
    g: torch.Tensor,
    chunk_size: int,
    *,
    cu_seqlens: Ints = None,
    chunk_indices: Ints = None,
) -> tuple[torch.Tensor, ...]:
    _inputs(k, v, beta=beta, g=g)
    dk, dv = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    dbeta, dg = torch.full_like(beta, torch.nan), torch.full_like(g, torch.nan)
    for _, _, rows, decay in _each(g, chunk_size, cu_seqlens, chunk_indices):
        size = rows.stop - rows.start
        kc, vc, dwc, duc = (x[0, :, rows].float() for x in (k, v, dw, du))
        a, d = (x[0, :, rows, :size].float() for x in (A, dA))
        b, e = beta[0, :, rows, None], decay.exp()[..., None]
        d_weighted, d_valued = a.mT @ dwc, a.mT @ duc
        products = d * (kc @ kc.mT)
        values = (
            (dk, d_weighted * b * e + b * (d @ kc) + (d * b).mT @ kc),
            (dv, d_valued * b),
            (dbeta, (d_weighted * kc * e).sum(-1) + (d_valued * vc).sum(-1) + products.sum(-1)),
            (dg, (d_weighted * kc * b * e).sum(-1) + (products * b).sum(-1) - (products * b).sum(-2)),
        )
        for target, value in values:
            target[0, :, rows] = value.to(target.dtype)
    return dk, dv, dbeta, dg


def _conv_rows(x: torch.Tensor, weight: torch.Tensor, starts: Ints) -> list[slice]:
    require(x.ndim == 2, f"packed x must be [T, channels], given {tuple(x.shape)}")
    require_dtype("x", x, *_HALF)
    require_dtype("weight", weight, x.dtype)
    require(weight.ndim == 2 and weight.shape[0] in (2, 3, 4), "weight must be [W, channels], 2 to 4 taps")
    require_shape("weight", weight, (weight.shape[0], x.shape[1]))
    require(x.shape[1] % 16 == 0, f"channels must come in sixteens, given {x.shape[1]}")
    require(starts is not None and starts[0] == 0 and starts[-1] == len(x), "query_start_loc must cover x")
    assert starts is not None
    require(all(a < b for a, b in pairwise(starts)), "no empty sequence")
    return [slice(a, b) for a, b in pairwise(starts)]


def _conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    *,
    query_start_loc: Ints = None,
    cache_indices: Ints = None,
    initial_state_mode: Ints = None,
    num_accepted_tokens: Ints = None,
    activation_mode: int = 0,
    pad_slot_id: int = -1,
    run_mode: int = 0,
    head_num: int = 0,
) -> torch.Tensor:
    rows_of = _conv_rows(x, weight, query_start_loc)
    require(activation_mode == 0 and run_mode == 0, "only the plain prefill is simulated")
    taps, channels = weight.shape
    require_shape("conv_states", conv_states, (len(rows_of), taps - 1, channels))
    require_dtype("conv_states", conv_states, x.dtype)
    if bias is not None:
        require_dtype("bias", bias, x.dtype)
    y = torch.full_like(x, torch.nan)
    for n, rows in enumerate(rows_of):
        has_state = initial_state_mode is not None and initial_state_mode[n] == 1
        before = conv_states[n].float() if has_state else torch.zeros(taps - 1, channels)
        seen = torch.cat((before, x[rows].float()))
        length = rows.stop - rows.start
        summed = torch.stack([seen[j : j + length] * weight[j].float() for j in range(taps)]).sum(0)
        y[rows] = (summed + (0.0 if bias is None else bias.float())).to(x.dtype)
        conv_states[n] = seen[-(taps - 1) :].to(x.dtype)
    return y


def _conv_bwd(
    x: torch.Tensor,
    y: Any,
    weight: torch.Tensor,
    dy: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    dht: Any = None,
    *,
    query_start_loc: Ints = None,
    activation: int = 0,
    input_layout: str = "BSND",
) -> tuple[torch.Tensor, ...]:
    rows_of = _conv_rows(x, weight, query_start_loc)
    require(input_layout == "TND" and activation == 0 and dht is None, "only the plain pack is simulated")
    require_shape("dy", dy, x.shape)
    taps, channels = weight.shape
    if initial_state is not None:
        require_shape("initial_state", initial_state, (len(rows_of), taps, channels))
    dx = torch.full_like(x, torch.nan)
    dw = torch.zeros(taps, channels)
    dh0 = torch.zeros(len(rows_of), taps, channels)
    for n, rows in enumerate(rows_of):
        before = torch.zeros(taps - 1, channels) if initial_state is None else initial_state[n, 1:].float()
        seen, d, length = torch.cat((before, x[rows].float())), dy[rows].float(), rows.stop - rows.start
        dseen = torch.zeros_like(seen)
        for j in range(taps):
            dseen[j : j + length] += d * weight[j].float()
            dw[j] += (d * seen[j : j + length]).sum(0)
        dh0[n, 1:], dx[rows] = dseen[: taps - 1], dseen[taps - 1 :].to(x.dtype)
    return dx, dw.to(x.dtype), dy.float().sum(0).to(x.dtype), dh0.to(x.dtype)


KERNELS: dict[str, Kernel] = {
    "npu_recompute_w_u_fwd": _recompute_w_u,
    "npu_chunk_gated_delta_rule_fwd_h": _fwd_h,
    "npu_chunk_fwd_o": _fwd_o,
    "npu_chunk_bwd_dv_local": _bwd_dv_local,
    "npu_chunk_gated_delta_rule_bwd_dhu": _bwd_dhu,
    "npu_chunk_bwd_dqkwg": _bwd_dqkwg,
    "npu_prepare_wy_repr_bwd_da": _wy_bwd_da,
    "npu_prepare_wy_repr_bwd_full": _wy_bwd_full,
    "npu_causal_conv1d": _conv,
    "npu_causal_conv1d_bwd": _conv_bwd,
}
