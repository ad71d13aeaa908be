"""One parity case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from relax_kernels.testing.memory import nan_in_new_memory
from relax_kernels.testing.target import Target


@dataclass(frozen=True)
class Case:
    """A call of an operator whose values and gradients are compared with a reference."""

    op: str
    name: str
    """Operator and what is special, for instance `attention-1.3.64-bfloat16`."""
    run: Callable[[Target], None]

    def check(self, target: Target) -> None:
        """Raise AssertionError if a result differs, NotServed if the backend does not serve the call.

        Runs with new memory full of NaN.
        """
        with nan_in_new_memory():
            self.run(target)


def dtype_name(dtype: object) -> str:
    """Return `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
