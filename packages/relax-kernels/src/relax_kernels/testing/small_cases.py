"""Parity cases of the convolution, the norms, the rotary embedding and the gated products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.ops.rotary import rotary_cos_sin
from relax_kernels.testing import references
from relax_kernels.testing.case import Case, dtype_name
from relax_kernels.testing.compare import assert_parity, float64_leaves, grads_of, tolerance
from relax_kernels.testing.target import Target

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CONV_LENGTHS = ((1,), (3,), (63,), (64,), (65,), (127,), (1000,), (5, 0, 64, 1, 0, 2, 127, 3), (1,) * 9)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for lengths in CONV_LENGTHS:
        yield _conv(f"lengths-{'.'.join(map(str, lengths))}", lengths)
    for width in (2, 3, 4):
        for activation in ("silu", None):
            yield _conv(f"width-{width}-{activation}", (5, 0, 2, 33), width=width, activation=activation)
    yield _conv("no-bias", (5, 1, 33), bias=False)
    yield _conv("no-states", (5, 0, 1, 33), states=False)
    for dtype in DTYPES[1:]:
        yield _conv(dtype_name(dtype), (5, 0, 1, 65), dtype=dtype)
        yield _conv(f"no-states-{dtype_name(dtype)}", (5, 0, 1, 65), dtype=dtype, states=False)
        yield _conv(f"channels-1000-{dtype_name(dtype)}", (70, 3), dtype=dtype, channels=1000)
    for dtype in DTYPES:
        name = dtype_name(dtype)
        yield Case("causal_conv1d_step", f"causal_conv1d_step-{name}", partial(_check_conv_step, dtype))
        for shape in ((1, 64), (65, 2, 128), (33, 256), (7, 1000), (3, 4096)):
            named = f"{'.'.join(map(str, shape))}-{name}"
            yield Case("rms_norm", f"rms_norm-{named}", partial(_check_norm, shape, dtype, True))
            yield Case("rms_norm", f"rms_norm-plain-{named}", partial(_check_norm, shape, dtype, False))
            run = partial(_check_norm_of_sum, shape, dtype)
            yield Case("add_rms_norm", f"add_rms_norm-{named}", partial(run, True))
            yield Case("add_rms_norm", f"add_rms_norm-plain-{named}", partial(run, False))
            yield Case("gated_rms_norm", f"gated_rms_norm-{named}", partial(_check_gated_norm, shape, dtype))
            yield Case("swiglu", f"swiglu-{named}", partial(_check_swiglu, shape, dtype))
            yield Case(
                "output_gate", f"output_gate-{named}", partial(_check_output_gate, shape, shape, dtype)
            )
        narrow = partial(_check_output_gate, (65, 128), (65, 1), dtype)
        yield Case("output_gate", f"output_gate-of-rows-{name}", narrow)
        for tokens, heads, low, high in ((1, 1, -3.0, 3.0), (65, 32, -3.0, 3.0), (33, 4, -100.0, 100.0)):
            run = partial(_check_delta_gates, tokens, heads, (low, high), dtype)
            yield Case("delta_gates", f"delta_gates-{tokens}.{heads}-to-{high:g}-{name}", run)
        for heads, dim, rotated in ((2, 64, 16), (1, 64, 64), (3, 256, 64)):
            run = partial(_check_rotary, heads, dim, rotated, dtype)
            yield Case("rotary", f"rotary-{heads}.{dim}.{rotated}-{name}", run)


def _compare(
    target: Target,
    dtype: torch.dtype,
    outputs: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor | None],
    reference: Callable[..., Sequence[torch.Tensor | None]],
    names: str,
) -> None:
    leaves = float64_leaves(inputs)
    expected = reference(*leaves)
    grads, expected_grads = grads_of(outputs, inputs), grads_of(expected, leaves)
    assert_parity((*outputs, *grads), (*expected, *expected_grads), tolerance(dtype, target.device), names)


def _conv(name: str, lengths: tuple[int, ...], **options: Any) -> Case:
    return Case("causal_conv1d", f"causal_conv1d-{name}", partial(_check_conv, lengths, **options))


def _check_conv(
    lengths: tuple[int, ...],
    target: Target,
    *,
    width: int = 4,
    activation: str | None = "silu",
    bias: bool = True,
    states: bool = True,
    channels: int = 32,
    dtype: torch.dtype = torch.float32,
) -> None:
    cu = CuSeqlens.from_lengths(lengths)
    x = target.normal(cu.total, channels, seed=1, dtype=dtype)
    weight = target.normal(channels, width, seed=2, dtype=dtype)
    bias_C = target.normal(channels, seed=3, dtype=dtype) if bias else None
    initial = target.normal(len(lengths), channels, width - 1, seed=4, dtype=dtype) if states else None
    outputs = target.run(
        "causal_conv1d",
        x,
        weight,
        bias_C,
        cu_seqlens=cu,
        activation=activation,
        initial_state_NCW=initial,
        output_final_state=states,
    )
    assert outputs[0].dtype == dtype

    def reference(*leaves: Any) -> Sequence[torch.Tensor | None]:
        y, final = references.causal_conv1d(leaves[0], leaves[1], leaves[2], cu, activation, leaves[3])
        return y, final if states else None

    names = f"y final_state dx dweight {'dbias' if bias else ''} {'dinitial' if states else ''}"
    _compare(target, dtype, outputs, (x, weight, bias_C, initial), reference, names)


def _check_conv_step(dtype: torch.dtype, target: Target) -> None:
    x, state = (target.normal(*shape, seed=1, dtype=dtype).detach() for shape in ((3, 32), (3, 32, 3)))
    weight, bias = (target.normal(*shape, seed=2, dtype=dtype).detach() for shape in ((32, 4), (32,)))
    before = state.clone()
    outputs = target.run("causal_conv1d_step", x, state, weight, bias)
    assert torch.equal(state, before), "the given state changed"
    cu = CuSeqlens.from_lengths((1, 1, 1))
    x64, state64, weight64, bias64 = (t.cpu().double() for t in (x, state, weight, bias))
    expected = references.causal_conv1d(x64, weight64, bias64, cu, "silu", state64)
    assert_parity(outputs, expected, tolerance(dtype, target.device), "y state")


def _check_norm(shape: tuple[int, ...], dtype: torch.dtype, zero_centred: bool, target: Target) -> None:
    x, weight = target.normal(*shape, seed=1, dtype=dtype), target.normal(shape[-1], seed=2, dtype=dtype)
    y = target.run("rms_norm", x, weight, eps=1e-6, zero_centred=zero_centred)
    assert y.dtype == dtype

    def reference(*leaves: Any) -> Sequence[torch.Tensor]:
        return (references.rms_norm(leaves[0], leaves[1], 1e-6, zero_centred),)

    _compare(target, dtype, (y,), (x, weight), reference, "y dx dweight")


def _check_norm_of_sum(
    shape: tuple[int, ...], dtype: torch.dtype, zero_centred: bool, target: Target
) -> None:
    x, residual = (target.normal(*shape, seed=seed, dtype=dtype) for seed in (1, 2))
    weight = target.normal(shape[-1], seed=3, dtype=dtype)
    outputs = target.run("add_rms_norm", x, residual, weight, eps=1e-6, zero_centred=zero_centred)
    assert [y.dtype for y in outputs] == [dtype, dtype]
    assert torch.equal(outputs[1], x + residual), "the sum is not that of torch"

    def reference(*leaves: Any) -> Sequence[torch.Tensor]:
        total = leaves[0] + leaves[1]
        return references.rms_norm(total, leaves[2], 1e-6, zero_centred), total

    _compare(target, dtype, outputs, (x, residual, weight), reference, "normed sum dx dresidual dweight")


def _check_delta_gates(
    tokens: int, heads: int, bounds: tuple[float, float], dtype: torch.dtype, target: Target
) -> None:
    low, high = bounds
    # Slices of one projection, as the layer has them.
    both = target.uniform(tokens, 2 * heads, low=low, high=high, seed=1, dtype=dtype)
    a, b = both[:, :heads], both[:, heads:]
    A_log = target.uniform(heads, low=-3.0, high=2.7, seed=2, dtype=_exact(dtype))
    dt_bias = target.normal(heads, seed=3, dtype=_exact(dtype))
    outputs = target.run("delta_gates", a, b, A_log, dt_bias)
    assert [y.dtype for y in outputs] == [_exact(dtype), dtype]

    def reference(*leaves: Any) -> Sequence[torch.Tensor]:
        return references.delta_gates(leaves[0][:, :heads], leaves[0][:, heads:], *leaves[1:])

    _compare(target, dtype, outputs, (both, A_log, dt_bias), reference, "g beta dprojection dA_log ddt_bias")


def _check_gated_norm(shape: tuple[int, ...], dtype: torch.dtype, target: Target) -> None:
    x, gate = (target.normal(*shape, seed=seed, dtype=dtype) for seed in (1, 2))
    weight = target.normal(shape[-1], seed=3, dtype=_exact(dtype))
    y = target.run("gated_rms_norm", x, gate, weight, eps=1e-6)
    assert y.dtype == dtype

    def reference(*leaves: Any) -> Sequence[torch.Tensor]:
        return (references.gated_rms_norm(leaves[0], leaves[1], leaves[2], 1e-6),)

    _compare(target, dtype, (y,), (x, gate, weight), reference, "y dx dgate dweight")


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_swiglu(shape: tuple[int, ...], dtype: torch.dtype, target: Target) -> None:
    gate_up = target.normal(*shape, seed=1, dtype=dtype)
    y = target.run("swiglu", gate_up)
    assert y.dtype == dtype

    def reference(*leaves: Any) -> Sequence[torch.Tensor]:
        half = shape[-1] // 2
        gate, up = leaves[0][..., :half], leaves[0][..., half:]
        return (gate / (1 + (-gate).exp()) * up,)

    _compare(target, dtype, (y,), (gate_up,), reference, "y dgate_up")


def _check_output_gate(
    shape: tuple[int, ...], gate_shape: tuple[int, ...], dtype: torch.dtype, target: Target
) -> None:
    x, gate = target.normal(*shape, seed=1, dtype=dtype), target.normal(*gate_shape, seed=2, dtype=dtype)
    y = target.run("output_gate", x, gate)
    assert y.dtype == dtype

    def reference(*leaves: Any) -> Sequence[torch.Tensor]:
        return (leaves[0] / (1 + (-leaves[1]).exp()),)

    _compare(target, dtype, (y,), (x, gate), reference, "y dx dgate")


def _check_rotary(heads: int, dim: int, rotated: int, dtype: torch.dtype, target: Target) -> None:
    x = target.normal(65, heads, dim, seed=1, dtype=dtype)
    place = torch.arange(65, device=target.device)
    cos, sin = rotary_cos_sin(place, dim=rotated, base=1e7, dtype=_exact(dtype))
    y = target.run("rotary", x, cos, sin)
    assert y.dtype == dtype

    def reference(*leaves: Any) -> Sequence[torch.Tensor]:
        return (references.rotary(leaves[0], cos.cpu().double(), sin.cpu().double()),)

    _compare(target, dtype, (y,), (x,), reference, "y dx")
