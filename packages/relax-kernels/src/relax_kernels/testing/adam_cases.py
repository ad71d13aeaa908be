"""Parity cases of AdamW, against torch's own in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from relax_kernels.split_float import join_float32, split_float32
from relax_kernels.testing.case import Case, dtype_name
from relax_kernels.testing.compare import assert_near
from relax_kernels.testing.target import Target

OPTIONS = {"lr": 3e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.1}
STEPS = 4


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for size in (1, 63, 1024, 5000):
        for split in (False, True):
            for states in (torch.float32, torch.bfloat16):
                for grads in (torch.float32, torch.bfloat16):
                    kinds = f"{dtype_name(states)}-grad-{dtype_name(grads)}"
                    name = f"adamw_step-{size}-{'split' if split else 'whole'}-{kinds}"
                    yield Case("adamw_step", name, partial(_check, size, split, states, grads))
    run = partial(_check, 65, False, torch.float64, torch.float64)
    yield Case("adamw_step", "adamw_step-float64", run)


def _check(size: int, split: bool, states: torch.dtype, grads: torch.dtype, target: Target) -> None:
    whole = torch.float64 if states == torch.float64 else torch.float32
    start = target.normal(size, seed=1, dtype=whole).detach()
    expected = start.double().cpu().requires_grad_()
    optimizer = torch.optim.AdamW(
        [expected], lr=OPTIONS["lr"], betas=(OPTIONS["beta1"], OPTIONS["beta2"]), eps=OPTIONS["eps"],
        weight_decay=OPTIONS["weight_decay"],
    )  # fmt: skip
    weight, rest = split_float32(start) if split else (start.clone(), None)
    mean, square = (torch.zeros(size, dtype=states, device=start.device) for _ in range(2))
    for step in range(1, STEPS + 1):
        grad = target.normal(size, seed=step + 1, dtype=grads).detach()
        before = grad.clone()
        target.run("adamw_step", weight, grad, mean, square, rest, step=step, grad_scale=0.7, **OPTIONS)
        assert torch.equal(grad, before), "the gradient was changed"
        expected.grad = grad.double().cpu() * 0.7
        optimizer.step()
    result = weight if rest is None else join_float32(weight, rest)
    # bfloat16 states are off by 2^-9 after each step, which an update takes over.
    moved = float((expected.detach() - start.double().cpu()).abs().max())
    allowed = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float64: 1e-12}[states]
    scale = max(float(expected.detach().abs().max()), 1e-3)
    assert_near(result, expected, allowed * max(1.0, moved / scale), "weight")
    state = optimizer.state[expected]
    near = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float64: 1e-12}[states]
    assert_near(mean, state["exp_avg"], near, "mean")
    assert_near(square, state["exp_avg_sq"], near, "square")
