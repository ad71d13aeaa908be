"""Kernels of the causal depthwise convolution of up to four taps over packed sequences.

T tokens, C channels, B channels and L tokens of one program. `ages` holds each token's place in its own
sequence: a window never reaches back further than that. The backward kernel walks through its tokens and
keeps what it needs of the last three in registers, so that every input is read once and every activation
computed once.
"""

from __future__ import annotations

import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from relax_kernels.triton_backend.jit import jit

# The interpreter has no device library.
ON_DEVICE = tl.constexpr(not knobs.runtime.interpret)


@jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Return the sigmoid, to about two units in the last place of float32, without the care for denormals.

    The convolution is bounded by instructions, and that care is most of what the exact functions consist of.
    """
    if ON_DEVICE:
        return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))
    return tl.sigmoid(x)


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
        y_LB *= sigmoid(y_LB)
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
    UNROLL: tl.constexpr,
) -> None:
    """Write dx and this program's part of dweight [P, 4, C] (tap of the present first) and dbias [P, C].

    The walk goes three tokens past the program's own: their outputs reach back to its last inputs. back_1 to
    back_3 are the inputs before the token; partial_1 to partial_3 their gradients as far as they are known,
    complete once three more tokens have passed; x_0 to x_2 and dy_0 to dy_2 the next tokens, on their way.
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

    own = tl.minimum(L, tokens - start)
    reach = tl.minimum(L + 3, tokens - start)
    x_place = x + start.to(tl.int64) * x_stride_t + channel
    dy_place = dy + start.to(tl.int64) * dy_stride_t + channel
    dx_place = dx + (start.to(tl.int64) - 3) * C + channel
    age = tl.load(ages + start)
    back_1 = tl.load(x_place - x_stride_t, mask=inside & (age > 0), other=0.0).to(tl.float32)
    back_2 = tl.load(x_place - 2 * x_stride_t, mask=inside & (age > 1), other=0.0).to(tl.float32)
    back_3 = tl.load(x_place - 3 * x_stride_t, mask=inside & (age > 2), other=0.0).to(tl.float32)
    partial_1 = tl.zeros([B], tl.float32)
    partial_2 = tl.zeros([B], tl.float32)
    partial_3 = tl.zeros([B], tl.float32)
    x_0 = tl.load(x_place, mask=inside, other=0.0)
    x_1 = tl.load(x_place + x_stride_t, mask=inside & (reach > 1), other=0.0)
    x_2 = tl.load(x_place + 2 * x_stride_t, mask=inside & (reach > 2), other=0.0)
    dy_0 = tl.load(dy_place, mask=inside, other=0.0)
    dy_1 = tl.load(dy_place + dy_stride_t, mask=inside & (reach > 1), other=0.0)
    dy_2 = tl.load(dy_place + 2 * dy_stride_t, mask=inside & (reach > 2), other=0.0)
    # No sequence begins after the first token exactly if the last is as far into its own as into this walk,
    # or more.
    has_borders = tl.load(ages + start + reach - 1) < reach - 1
    for part in tl.static_range(4):
        # Parts 0 and 1 take care of borders, 2 and 3 need not. The even ones take the program's own tokens,
        # the odd ones the three behind them, which do not count for the taps.
        begin = 0 if part % 2 == 0 else own
        end = own if part % 2 == 0 else own + 3
        end = tl.where(has_borders == (part < 2), end, begin)
        for step in tl.range(begin, end, loop_unroll_factor=UNROLL):
            now = x_0.to(tl.float32)
            dy_B = dy_0.to(tl.float32)
            x_0 = x_1
            x_1 = x_2
            dy_0 = dy_1
            dy_1 = dy_2
            ahead = inside & (step + 3 < reach)
            x_2 = tl.load(x_place + (step + 3) * x_stride_t, mask=ahead, other=0.0)
            dy_2 = tl.load(dy_place + (step + 3) * dy_stride_t, mask=ahead, other=0.0)
            if part < 2:
                age = tl.load(ages + start + step, mask=step < reach, other=0)
                back_1 = tl.where(age > 0, back_1, 0.0)
                back_2 = tl.where(age > 1, back_2, 0.0)
                back_3 = tl.where(age > 2, back_3, 0.0)
            if SILU:
                y_B = shift + tap_0 * now + tap_1 * back_1 + tap_2 * back_2 + tap_3 * back_3
                sigmoid_B = sigmoid(y_B)
                dy_B *= sigmoid_B + y_B * (sigmoid_B - sigmoid_B * sigmoid_B)
            if part % 2 == 0:
                dtap_0 += dy_B * now
                dtap_1 += dy_B * back_1
                dtap_2 += dy_B * back_2
                dtap_3 += dy_B * back_3
                if HAS_BIAS:
                    dshift += dy_B
            if part < 2:
                partial_1 += tl.where(age > 0, tap_1 * dy_B, 0.0)
                partial_2 += tl.where(age > 1, tap_2 * dy_B, 0.0)
                partial_3 += tl.where(age > 2, tap_3 * dy_B, 0.0)
            else:
                partial_1 += tap_1 * dy_B
                partial_2 += tap_2 * dy_B
                partial_3 += tap_3 * dy_B
            tl.store(dx_place + step * C, partial_3.to(dx.dtype.element_ty), mask=inside & (step >= 3))
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
