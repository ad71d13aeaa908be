"""What a case runs on: a backend, on a type of device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import relax_kernels
from relax_kernels.errors import NoBackend
from relax_kernels.explanation import explain
from relax_kernels.registry import backends


class NotServed(NoBackend):
    """The backend said of itself that it does not serve the call: nothing to compare."""


@dataclass(frozen=True)
class Target:
    """A backend and the device type it is tested on."""

    backend: str
    device: str

    def run(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """Call an operator on this backend. Raises NotServed if the backend refuses the call."""
        explanation = explain(op, *args, backend=self.backend, **kwargs)
        if explanation.chosen is None:
            raise NotServed(explanation.detail)
        return getattr(relax_kernels, op)(*args, backend=self.backend, **kwargs)

    def normal(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return normal numbers that do not depend on the device, as a leaf that wants a gradient."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(self.device, dtype).requires_grad_()

    def uniform(
        self, *shape: int, low: float, high: float, seed: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return uniform numbers that do not depend on the device, as a leaf that wants a gradient."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.rand(*shape, generator=generator, dtype=torch.float64) * (high - low) + low
        return values.to(self.device, dtype).requires_grad_()


def targets() -> list[Target]:
    """Return every installed backend on every device type that is present and that it runs on."""
    present = {"cpu"}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        present.add(accelerator.type)
    found = []
    for backend in backends():
        kinds = present if backend.device_types is None else present & backend.device_types
        found += [Target(backend.name, kind) for kind in sorted(kinds)]
    return found
