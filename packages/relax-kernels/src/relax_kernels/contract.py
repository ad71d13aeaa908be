"""What a backend must satisfy: `Backend`, the call it is asked about, `Call`, and the rules below.

A backend is a package (one folder) with a factory `() -> Backend`, named in the entry-point group
`relax_kernels.backends`. The factory raises `BackendUnavailable` (or ImportError) where the backend cannot
run. The registry asks a backend three things: which operators it has and for which device types, whether it
serves one particular call (and if not, why), and for the function that does the work.

**Call.** The function gets exactly the arguments of the public operator of the same name
(`relax_kernels/ops/`), less `backend`, after the inputs were checked and the defaults resolved. Shapes,
dtypes, devices and lengths are therefore right; whatever else the backend needs it says in `refusal`, before
anything runs, never by an error from a kernel.

**Lengths.** `CuSeqlens.host` and `.lengths` are Python integers, for libraries that want them so;
`.on(device)` is the int32 tensor; `.table(key, build)` keeps derived tables. A call must not read a tensor
back to the host to learn a length. Sequences may be empty, or of one token. What a library wants padded
(multiples, a common length), the backend pads and cuts again: no token sees padding or another sequence, not
even a NaN there.

**Layout.** Tensors come as the docstring says, packed [T, ...], and may be slices of a fused projection, so
with strides. A backend whose library wants other layouts moves the data itself. Inputs are never written to.

**Results.** What the operator returns, named tuples as plain ones; `attention` always a pair of output and
log-sum-exp (or None), `linear_logprob` always four (None for what was not asked for). Dtypes as in the
docstring: sums and states in float32, float64 for float64, whatever the library keeps. The same call gives
the same bits again.

**Gradients.** Differentiable by autograd wherever the public docstring says the operator is, in every tensor
and through every result it names. Where a library has no backward pass, the backend brings one, or refuses
calls with `Call.needs_grad`.

**Proof.** It passes `relax_kernels.testing.parity_cases()` in its own tests, or `python -m relax_kernels
check --backend <name>`; a case that it refuses counts as not served.
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
    """Arguments that are not tensors, by name; for each optional tensor `has_<name>`, without its axes."""
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
