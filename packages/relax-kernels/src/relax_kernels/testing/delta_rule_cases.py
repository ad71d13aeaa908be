"""Parity cases of the gated delta rule, the chunked form and the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.testing import references
from relax_kernels.testing.case import Case, dtype_name
from relax_kernels.testing.compare import assert_near, assert_parity, float64_leaves, grads_of, tolerance
from relax_kernels.testing.target import Target

NAMES = "o final_state dq dk dv dg dbeta dinitial_state"
LENGTHS = (
    (1,),
    (3,),
    (63,),
    (64,),
    (65,),
    (127,),
    (1000,),
    (5, 0, 64, 1, 0, 127, 3),
    (12, 20, 17, 13, 16, 1, 19),
    (33, 32, 31, 66, 0),
)


@dataclass(frozen=True)
class _Setting:
    lengths: tuple[int, ...] = (5, 0, 64, 1, 127)
    heads: tuple[int, int, int, int] = (1, 2, 64, 64)
    """H, U, K, V."""
    dtype: torch.dtype = torch.float32
    initial: bool = True
    final: bool = True
    l2norm: bool = True
    scale: float | None = None
    decay: tuple[float, float] = (-1.0, 0.0)
    """Range of g."""
    size: float = 1.0
    """Factor on q, k and v."""
    closed: float | None = None
    """g of every third (token, head) or so."""
    on_own_scale: bool = False
    """Compare dg of closed gates on its own scale too."""


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for lengths in LENGTHS:
        named = ".".join(map(str, lengths))
        yield _case(f"lengths-{named}", _Setting(lengths=lengths))
        yield _case(f"lengths-{named}-no-states", _Setting(lengths=lengths, initial=False, final=False))
    for heads in ((2, 2, 64, 64), (2, 4, 128, 128), (1, 3, 64, 128), (1, 1, 256, 256)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            name = f"heads-{'.'.join(map(str, heads))}-{dtype_name(dtype)}"
            yield _case(name, _Setting(lengths=(65, 3), heads=heads, dtype=dtype))
    yield _case("bfloat16-long", _Setting(lengths=(300, 1), dtype=torch.bfloat16))
    yield _case("float16", _Setting(dtype=torch.float16))
    yield _case("initial-state-only", _Setting(final=False))
    yield _case("final-state-only", _Setting(initial=False))
    yield _case("no-l2norm", _Setting(l2norm=False, size=0.1))
    yield _case("scale", _Setting(scale=0.37))
    yield _case("forgets-everything", _Setting(decay=(-90.0, -60.0)))
    yield _case("forgets-nothing", _Setting(decay=(0.0, 0.0)))
    yield _case("forgets-now-and-then", _Setting(decay=(-40.0, 0.0)))
    yield from closing_gate_cases(on_own_scale=False)
    yield _case("large-values", _Setting(size=100.0))
    for dtype in (torch.float32, torch.bfloat16):
        yield Case(
            "gated_delta_rule_step", f"gated_delta_rule_step-{dtype_name(dtype)}", partial(_check_step, dtype)
        )


def closing_gate_cases(on_own_scale: bool) -> Iterator[Case]:
    """Yield cases whose gates close now and then, between open ones.

    on_own_scale: compare dg of the closed gates also on its own scale. Little passes them, so dg is small
    there, but g, which it is multiplied with further back, is large. The suite does not ask for that.
    """
    for closed in (-8.0, -30.0, -1000.0):
        for dtype, dim in ((torch.float32, 64), (torch.bfloat16, 128)):
            setting = _Setting((20, 150, 64), (1, 2, dim, dim), dtype, decay=(-0.5, 0.0), closed=closed)
            name = f"closes-now-and-then{closed:g}-{dtype_name(dtype)}"
            yield _case(name, replace(setting, on_own_scale=on_own_scale))


def _case(name: str, setting: _Setting) -> Case:
    return Case("gated_delta_rule", f"gated_delta_rule-{name}", partial(_check, setting))


def _check(s: _Setting, target: Target) -> None:
    lengths = CuSeqlens.from_lengths(s.lengths)
    (H, U, K, V), T = s.heads, lengths.total
    q = (target.normal(T, H, K, seed=1).detach() * s.size).to(s.dtype).requires_grad_()
    k = (target.normal(T, H, K, seed=2).detach() * s.size).to(s.dtype).requires_grad_()
    v = (target.normal(T, U, V, seed=3).detach() * s.size).to(s.dtype).requires_grad_()
    exact = torch.float64 if s.dtype == torch.float64 else torch.float32
    g = target.uniform(T, U, low=s.decay[0], high=s.decay[1], seed=4, dtype=exact)
    closed_TU = target.uniform(T, U, low=0.0, high=1.0, seed=7).detach() < 0.3
    if s.closed is not None:
        g = torch.where(closed_TU, s.closed, g.detach()).requires_grad_()
    beta = target.uniform(T, U, low=0.0, high=1.0, seed=5, dtype=s.dtype)
    initial = target.normal(len(lengths), U, K, V, seed=6, dtype=exact) if s.initial else None
    inputs = (q, k, v, g, beta, initial)

    o, final = target.run(
        "gated_delta_rule",
        *inputs[:5],
        cu_seqlens=lengths,
        initial_state_NUKV=initial,
        output_final_state=s.final,
        qk_l2norm=s.l2norm,
        scale=s.scale,
    )
    assert o.dtype == s.dtype
    grads = grads_of((o, final), inputs)
    *leaves, initial64 = float64_leaves(inputs)
    expected = references.gated_delta_rule(
        *leaves,
        cu_seqlens=lengths,
        initial_state_NUKV=initial64,
        output_final_state=s.final,
        qk_l2norm=s.l2norm,
        scale=s.scale,
    )
    names = NAMES if s.initial else NAMES.removesuffix(" dinitial_state")
    expected_grads = grads_of(expected, [*leaves, initial64])
    allowed = tolerance(s.dtype, target.device)
    assert_parity((o, final, *grads), (*expected, *expected_grads), allowed, names)
    if s.on_own_scale:
        _check_closed(grads[3], expected_grads[3], closed_TU.cpu(), allowed)


def _check_closed(
    dg_TU: torch.Tensor | None, expected_TU: torch.Tensor | None, closed_TU: torch.Tensor, allowed: float
) -> None:
    assert dg_TU is not None
    assert expected_TU is not None
    actual, expected = dg_TU.cpu().double()[closed_TU], expected_TU[closed_TU]
    largest = float(expected.abs().max())
    assert largest < 1e-1, "gates are not closed"
    if largest:
        assert_near(actual / largest, expected / largest, allowed, "dg of closed gates")
    else:
        assert not actual.any(), "something passes gates that let nothing pass"


def _check_step(dtype: torch.dtype, target: Target) -> None:
    N, H, U, K, V = 3, 2, 4, 64, 128
    q, k = (target.normal(N, H, K, seed=seed, dtype=dtype).detach() for seed in (1, 2))
    v = target.normal(N, U, V, seed=3, dtype=dtype).detach()
    g = target.uniform(N, U, low=-2.0, high=0.0, seed=4).detach()
    beta = target.uniform(N, U, low=0.0, high=1.0, seed=5, dtype=dtype).detach()
    state = target.normal(N, U, K, V, seed=6).detach()
    before = state.clone()
    o, after = target.run("gated_delta_rule_step", q, k, v, g, beta, state)
    assert torch.equal(state, before), "the given state changed"
    assert o.dtype == dtype
    assert after.dtype == state.dtype == torch.float32
    expected = references.gated_delta_rule(
        *(x.cpu().double() for x in (q, k, v, g, beta)),
        cu_seqlens=CuSeqlens.from_lengths((1,) * N),
        initial_state_NUKV=state.cpu().double(),
        output_final_state=True,
    )
    assert_parity((o, after), expected, tolerance(dtype, target.device), "o state")
