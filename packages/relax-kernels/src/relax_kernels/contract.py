"""What a backend must satisfy: `Backend`, and the call it is asked about, `Call`.

A backend is a package (one folder) with a factory `() -> Backend`, named in the entry-point group
`relax_kernels.backends`. The registry asks it three things: which operators it has and for which device
types, whether it serves one particular call (and if not, why), and for the function that does the work. That
function is called with exactly the arguments of the public operator of the same name (`relax_kernels/ops/`),
less `backend`, after the inputs were checked and the defaults resolved; it must be differentiable by autograd
wherever the public docstring says the operator is. It returns what the operator returns, named tuples as
plain ones, and `attention` always a pair of output and log-sum-exp (or None). A backend passes
`relax_kernels.testing.parity_cases()` in its own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from relax_kernels.cu_seqlens import CuSeqlens

ENTRY_POINT_GROUP = "relax_kernels.backends"


@dataclass(frozen=True)
class Call:
    """One checked call of an operator, described without its data."""

    op: str
    device_type: str
    """`cpu`, `cuda`, `npu`, ..."""
    dtype: torch.dtype
    """dtype of the main input (the first tensor argument)."""
    sizes: Mapping[str, int]
    """Size of each axis, by the letter the public docstring uses."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are not tensors, by name, and for each optional tensor `has_<name>`."""
    cu_seqlens: CuSeqlens | None = None
    needs_grad: bool = False
    """Whether a backward pass through this call may follow."""


@runtime_checkable
class Backend(Protocol):
    """A family of implementations of some of the operators."""

    @property
    def name(self) -> str:
        """What users write in `backend=` and in the environment."""
        ...

    @property
    def device_types(self) -> frozenset[str] | None:
        """Device types it runs on; None for any."""
        ...

    @property
    def priority(self) -> int:
        """Among backends that serve a call the highest is taken; the torch reference has 0."""
        ...

    @property
    def operators(self) -> frozenset[str]:
        """Names of the operators it has."""
        ...

    def refusal(self, call: Call) -> str | None:
        """Say why it does not serve a call of one of its operators on one of its devices; None: it does."""
        ...

    def implementation(self, op: str) -> Callable[..., Any]:
        """Return the function for one of its operators; may import lazily."""
        ...

    def describe(self, call: Call) -> str:
        """Name what would run (a kernel, a library and its version), for `explain`."""
        ...
