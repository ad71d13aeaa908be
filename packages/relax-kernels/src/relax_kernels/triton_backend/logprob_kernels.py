"""Kernels over one slice of the logits: what the softmax needs of it, and the gradient of its logits.

T tokens, C vocabulary entries of the slice, W entries of one step. Logits are float32, before the
temperature.
"""

from __future__ import annotations

import triton.language as tl

from relax_kernels.triton_backend.jit import jit


@jit
def gather_kernel(
    logits: tl.tensor,
    target: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    chosen: tl.tensor,
    entries: tl.tensor,
    first: tl.tensor,
    stride_t: tl.tensor,
    inverse_temperature: tl.tensor,
    W: tl.constexpr,
    ENTROPY: tl.constexpr,
) -> None:
    """Take one token's slice into its running softmax; grid (T,).

    With z = logits / temperature: top = max z, total = sum exp(z - top), weighted = sum (z - top) exp(z -
    top), chosen = z of the target, if it lies in this slice, whose first entry is `first`.
    """
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride_t
    step = tl.arange(0, W)
    tops = tl.full([W], float("-inf"), tl.float32)
    totals = tl.zeros([W], tl.float32)
    weights = tl.zeros([W], tl.float32)
    for start in range(0, entries, W):
        place = start + step
        z = tl.load(row + place, mask=place < entries, other=float("-inf")) * inverse_temperature
        new = tl.maximum(tops, z)
        old = tl.where(tops == float("-inf"), 0.0, tl.exp(tops - new))
        now = tl.where(z == float("-inf"), 0.0, tl.exp(z - new))
        if ENTROPY:
            moved = tl.where(tops == float("-inf"), 0.0, (tops - new) * totals)
            weights = (weights + moved) * old + tl.where(z == float("-inf"), 0.0, (z - new) * now)
        totals = totals * old + now
        tops = new
    before = tl.load(top + token)
    new = tl.maximum(tl.max(tops), before)
    old = tl.where(before == float("-inf"), 0.0, tl.exp(before - new))
    now = tl.where(tops == float("-inf"), 0.0, tl.exp(tops - new))
    total_before = tl.load(total + token)
    if ENTROPY:
        gap = tl.where(before == float("-inf"), 0.0, before - new)
        sum_before = (tl.load(weighted + token) + gap * total_before) * old
        gaps = tl.where(tops == float("-inf"), 0.0, tops - new)
        tl.store(weighted + token, sum_before + tl.sum((weights + gaps * totals) * now))
    tl.store(total + token, total_before * old + tl.sum(totals * now))
    tl.store(top + token, new)
    place = tl.load(target + token) - first
    if (place >= 0) & (place < entries):
        tl.store(chosen + token, tl.load(row + place) * inverse_temperature)


@jit
def spread_kernel(
    logits: tl.tensor,
    target: tl.tensor,
    lse: tl.tensor,
    entropy: tl.tensor,
    dlogprob: tl.tensor,
    dentropy: tl.tensor,
    dlogits: tl.tensor,
    entries: tl.tensor,
    first: tl.tensor,
    stride_t: tl.tensor,
    out_stride_t: tl.tensor,
    inverse_temperature: tl.tensor,
    W: tl.constexpr,
    ENTROPY: tl.constexpr,
) -> None:
    """Write the gradient of W logits of one token, with log p = z - lse; grid (T, ceil(C / W)).

    dlogits = (dlogprob (onehot - p) - dentropy p (log p + entropy)) / temperature.
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * W + tl.arange(0, W)
    z = (
        tl.load(logits + token * stride_t + place, mask=place < entries, other=float("-inf"))
        * inverse_temperature
    )
    logp = z - tl.load(lse + token)
    p = tl.exp(logp)
    gain = tl.load(dlogprob + token)
    here = (tl.load(target + token) - first).to(tl.int32)
    d = tl.where(place == here, gain, 0.0) - gain * p
    if ENTROPY:
        d -= tl.load(dentropy + token) * p * (logp + tl.load(entropy + token))
    d *= inverse_temperature
    tl.store(dlogits + token * out_stride_t + place, d.to(dlogits.dtype.element_ty), mask=place < entries)


@jit
def weigh_kernel(
    logits: tl.tensor,
    target: tl.tensor,
    top: tl.tensor,
    weights: tl.tensor,
    entries: tl.tensor,
    first: tl.tensor,
    stride_t: tl.tensor,
    out_stride_t: tl.tensor,
    inverse_temperature: tl.tensor,
    W: tl.constexpr,
) -> None:
    """Write exp(logits / temperature - top) of one token, 0 for its target; grid (T, ceil(C / W))."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * W + tl.arange(0, W)
    inside = place < entries
    z = tl.load(logits + token * stride_t + place, mask=inside, other=float("-inf")) * inverse_temperature
    here = (tl.load(target + token) - first).to(tl.int32)
    w = tl.where(place == here, 0.0, tl.exp(z - tl.load(top + token)))
    tl.store(weights + token * out_stride_t + place, w.to(weights.dtype.element_ty), mask=inside)
