"""Every backend that is present against float64 references: values and all gradients."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from relax_kernels.explanation import CALLS
from relax_kernels.testing import Case, NotServed, Target, grads_of, parity_cases


@pytest.mark.parametrize("case", parity_cases(), ids=lambda case: case.name)
def test_equals_the_reference(case: Case, target: Target) -> None:
    try:
        case.check(target)
    except NotServed as reason:
        pytest.skip(str(reason))


def test_names_are_unique() -> None:
    names = [case.name for case in parity_cases()]
    assert len(set(names)) == len(names)


@dataclass(frozen=True)
class Twice(Target):
    """Makes every call twice and asserts equal bits, gradients included; a third time for the case itself.

    The first two on copies, for operators that change their tensors.
    """

    def run(self, op: str, *args: Any, **kwargs: Any) -> Any:
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
        results = []
        for _ in range(2):
            copies = [_copy(x) for x in args]
            result = super().run(op, *copies, **kwargs)
            outputs = result if isinstance(result, tuple) else (result,)
            gradients = grads_of([x for x in outputs if _floating(x)], inputs)
            results.append([*outputs, *gradients, *(x for x in copies if isinstance(x, torch.Tensor))])
        for first, second in zip(*results, strict=True):
            assert first is second or torch.equal(_bits(first), _bits(second))
        return super().run(op, *args, **kwargs)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) and not x.requires_grad else x


def _floating(x: torch.Tensor | None) -> bool:
    return x is not None and x.is_floating_point()


SOME = [case for op in CALLS for case in [c for c in parity_cases() if c.op == op][::7]]
"""Of every operator the first case and each seventh after it."""


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_runs_give_equal_bits(case: Case, target: Target) -> None:
    try:
        case.check(Twice(target.backend, target.device))
    except NotServed as reason:
        pytest.skip(str(reason))
