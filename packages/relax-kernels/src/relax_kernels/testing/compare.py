"""How results are compared: on the scale of the largest expected value, gradients included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest difference allowed, as a fraction of the largest expected value, by the dtype of the inputs."""


def tolerance(dtype: torch.dtype, device_type: str = "cpu") -> float:
    """Return the tolerance of a dtype; other devices than the CPU may multiply float32 as tf32."""
    if dtype == torch.float32 and device_type != "cpu":
        return 2e-3
    return TOLERANCE[dtype]


def assert_near(actual: torch.Tensor, expected: torch.Tensor, allowed: float, what: str = "result") -> None:
    """Raise AssertionError unless shapes agree and values are near; NaN never is, equal infinities are."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if not expected.numel():
        return
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    infinite = expected.isinf()
    assert torch.equal(actual[infinite], expected[infinite]), f"{what}: infinities differ"
    finite = ~infinite
    if not finite.any():
        return
    scale = max(float(expected[finite].abs().max()), 1e-3)
    worst = float((actual[finite] - expected[finite]).abs().max())
    assert worst <= allowed * scale, f"{what}: off by {worst:.3g} where the largest is {scale:.3g}"


def float64_leaves(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return the same values as float64 leaves on the CPU, which want gradients where the given ones do."""
    return [
        None if x is None else x.detach().to("cpu", torch.float64).requires_grad_(x.requires_grad)
        for x in tensors
    ]


def grads_of(
    outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None], seed: int = 99
) -> list[torch.Tensor | None]:
    """Return the gradients, by those inputs that want one, of a sum with another weight on every output
    value; None for an input that no output depends on.

    The weights depend on the shapes and the seed only, so that two implementations get the same ones.
    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if output is not None:
            weight = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            finite = torch.where(output.isinf(), 0.0, output.double())
            total = total.to(output.device) + (finite * weight.to(output.device)).sum()
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if not total.requires_grad:
        return [None] * len(wanted)
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def assert_parity(
    actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], allowed: float, names: str
) -> None:
    """Compare results by name; an absent one must be absent on both sides (an absent gradient is 0)."""
    for name, a, e in zip(names.split(), actual, expected, strict=True):
        if a is None and e is None:
            continue
        assert a is not None, f"{name} is missing"
        assert_near(a, torch.zeros_like(a) if e is None else e, allowed, name)
