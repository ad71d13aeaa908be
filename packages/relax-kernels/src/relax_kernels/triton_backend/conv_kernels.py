"""Kernels of the causal depthwise convolution of up to four taps over packed sequences.

T tokens, C channels, B channels and L tokens of one program. `ages` holds each token's place in its own
sequence: a window never reaches back further than that. The backward kernel walks through its tokens and
keeps what it needs of the last three in registers, so that every input is read once and every activation
computed once.
"""

from __future__ import annotations

import triton.language as tl

from relax_kernels.triton_backend.jit import jit


@jit
def conv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    ages: tl.tensor,
    y: tl.tensor,
    tokens: tl.tensor,
    x_stride_t: tl.tensor,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """Write y of L tokens and B channels; grid (ceil(T / L) * ceil(C / B),).

    Each tap loads its own shifted tile: all but one of those loads are served by the cache.
    """
    parts: tl.constexpr = (C + B - 1) // B
    channel = (tl.program_id(0) % parts) * B + tl.arange(0, B)
    inside = channel < C
    token = (tl.program_id(0) // parts) * L + tl.arange(0, L)
    age = tl.load(ages + token, mask=token < tokens, other=-1)
    y_LB = tl.zeros([L, B], tl.float32)
    if HAS_BIAS:
        y_LB += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(TAPS):
        tap_B = tl.load(weight + channel * TAPS + (TAPS - 1 - back), mask=inside, other=0.0).to(tl.float32)
        place = (token - back).to(tl.int64)[:, None] * x_stride_t + channel[None, :]
        x_LB = tl.load(x + place, mask=(age >= back)[:, None] & inside[None, :], other=0.0)
        y_LB += tap_B[None, :] * x_LB.to(tl.float32)
    if SILU:
        y_LB *= tl.sigmoid(y_LB)
    place = token.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(y + place, y_LB.to(y.dtype.element_ty), mask=(age >= 0)[:, None] & inside[None, :])


@jit
def conv_backward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    ages: tl.tensor,
    dy: tl.tensor,
    dx: tl.tensor,
    dweight: tl.tensor,
    dbias: tl.tensor,
    tokens: tl.tensor,
    x_stride_t: tl.tensor,
    dy_stride_t: tl.tensor,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """Write dx and this program's part of dweight [P, 4, C] (tap of the present first) and dbias [P, C].

    The walk goes three tokens past the program's own: their outputs reach back to its last inputs.
    Grid (P * ceil(C / B),) with P = ceil(T / L).
    """
    parts: tl.constexpr = (C + B - 1) // B
    channel = (tl.program_id(0) % parts) * B + tl.arange(0, B)
    inside = channel < C
    program = tl.program_id(0) // parts
    start = program * L
    tap_0 = tl.load(weight + channel * TAPS + (TAPS - 1), mask=inside, other=0.0).to(tl.float32)
    tap_1 = tl.load(weight + channel * TAPS + (TAPS - 2), mask=inside, other=0.0).to(tl.float32)
    tap_2 = tl.load(weight + channel * TAPS + (TAPS - 3), mask=inside & (TAPS > 2), other=0.0).to(tl.float32)
    tap_3 = tl.load(weight + channel * TAPS + (TAPS - 4), mask=inside & (TAPS > 3), other=0.0).to(tl.float32)
    shift = tl.zeros([B], tl.float32)
    if HAS_BIAS:
        shift += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    dtap_0 = tl.zeros([B], tl.float32)
    dtap_1 = tl.zeros([B], tl.float32)
    dtap_2 = tl.zeros([B], tl.float32)
    dtap_3 = tl.zeros([B], tl.float32)
    dshift = tl.zeros([B], tl.float32)

    x_place = x + start.to(tl.int64) * x_stride_t + channel
    dy_place = dy + start.to(tl.int64) * dy_stride_t + channel
    dx_place = dx + (start.to(tl.int64) - 3) * C + channel
    age = tl.load(ages + start)
    back_1 = tl.load(x_place - x_stride_t, mask=inside & (age > 0), other=0.0).to(tl.float32)
    back_2 = tl.load(x_place - 2 * x_stride_t, mask=inside & (age > 1), other=0.0).to(tl.float32)
    back_3 = tl.load(x_place - 3 * x_stride_t, mask=inside & (age > 2), other=0.0).to(tl.float32)
    # Gradients of the last three inputs as far as they are known: complete once three more tokens have
    # passed.
    partial_1 = tl.zeros([B], tl.float32)
    partial_2 = tl.zeros([B], tl.float32)
    partial_3 = tl.zeros([B], tl.float32)
    own = tl.minimum(L, tokens - start)
    reach = tl.minimum(L + 3, tokens - start)
    x_coming_0 = tl.load(x_place, mask=inside, other=0.0)
    x_coming_1 = tl.load(x_place + x_stride_t, mask=inside & (reach > 1), other=0.0)
    x_coming_2 = tl.load(x_place + 2 * x_stride_t, mask=inside & (reach > 2), other=0.0)
    dy_coming_0 = tl.load(dy_place, mask=inside, other=0.0)
    dy_coming_1 = tl.load(dy_place + dy_stride_t, mask=inside & (reach > 1), other=0.0)
    dy_coming_2 = tl.load(dy_place + 2 * dy_stride_t, mask=inside & (reach > 2), other=0.0)
    x_place += 3 * x_stride_t
    dy_place += 3 * dy_stride_t
    for step in range(own + 3):
        now = x_coming_0.to(tl.float32)
        dy_B = dy_coming_0.to(tl.float32)
        x_coming_0 = x_coming_1
        x_coming_1 = x_coming_2
        dy_coming_0 = dy_coming_1
        dy_coming_1 = dy_coming_2
        x_coming_2 = tl.load(x_place, mask=inside & (step + 3 < reach), other=0.0)
        dy_coming_2 = tl.load(dy_place, mask=inside & (step + 3 < reach), other=0.0)
        x_place += x_stride_t
        dy_place += dy_stride_t
        age = tl.load(ages + start + step, mask=step < reach, other=0)
        if age == 0:
            back_1 = tl.zeros([B], tl.float32)
            back_2 = tl.zeros([B], tl.float32)
            back_3 = tl.zeros([B], tl.float32)
        if SILU:
            y_B = shift + tap_0 * now + tap_1 * back_1 + tap_2 * back_2 + tap_3 * back_3
            sigmoid_B = tl.sigmoid(y_B)
            dy_B *= sigmoid_B * (1.0 + y_B * (1.0 - sigmoid_B))
        counted_B = tl.where(step < own, dy_B, 0.0)
        dtap_0 += counted_B * now
        dtap_1 += counted_B * back_1
        dtap_2 += counted_B * back_2
        dtap_3 += counted_B * back_3
        dshift += counted_B
        partial_1 += tl.where(age > 0, tap_1 * dy_B, 0.0)
        partial_2 += tl.where(age > 1, tap_2 * dy_B, 0.0)
        partial_3 += tl.where(age > 2, tap_3 * dy_B, 0.0)
        tl.store(dx_place, partial_3.to(dx.dtype.element_ty), mask=inside & (step >= 3))
        dx_place += C
        partial_3 = partial_2
        partial_2 = partial_1
        partial_1 = tap_0 * dy_B
        back_3 = back_2
        back_2 = back_1
        back_1 = now

    place = dweight + program.to(tl.int64) * (4 * C) + channel
    tl.store(place, dtap_0, mask=inside)
    tl.store(place + C, dtap_1, mask=inside)
    tl.store(place + 2 * C, dtap_2, mask=inside)
    tl.store(place + 3 * C, dtap_3, mask=inside)
    if HAS_BIAS:
        tl.store(dbias + program.to(tl.int64) * C + channel, dshift, mask=inside)
