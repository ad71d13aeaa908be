"""Names the tensors in which two checkpoints differ, and by how much."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from relax_bridge.checkpoint import Checkpoint
from relax_bridge.safetensors_writer import raw


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both.

    Attributes:
        name: the Hugging Face name.
        kind: `only in A`, `only in B`, `shape`, `dtype` or `values`.
        detail: for people.
        elements: how many elements differ (`values` and `dtype`).
        max_abs: the largest absolute difference, in float64; NaN if either side holds a NaN there.
    """

    name: str
    kind: str
    detail: str
    elements: int | None = None
    max_abs: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def diff(
    a: Checkpoint, b: Checkpoint, *, report: Callable[[int, int], None] | None = None
) -> Iterator[Difference]:
    """Compares two checkpoints tensor by tensor, bit for bit; in A's order, then what only B has.

    `report` is called with (bytes of A compared, bytes of A) after each tensor.
    """
    total, done = sum(map(a.nbytes, a.names)), 0
    for name in a.names:
        found = _compare(name, a, b)
        if found is not None:
            yield found
        done += a.nbytes(name)
        if report is not None:
            report(done, total)
    for name in b.names:
        if name not in a:
            yield Difference(name, "only in B", f"{list(b.shape(name))} {b.stored_dtype(name)}")


def _compare(name: str, a: Checkpoint, b: Checkpoint) -> Difference | None:
    if name not in b:
        return Difference(name, "only in A", f"{list(a.shape(name))} {a.stored_dtype(name)}")
    if a.shape(name) != b.shape(name):
        return Difference(name, "shape", f"{list(a.shape(name))} and {list(b.shape(name))}")
    return _values(name, a, b)


def _values(name: str, a: Checkpoint, b: Checkpoint) -> Difference | None:
    x, y = a.tensor(name), b.tensor(name)
    same_dtype = a.stored_dtype(name) == b.stored_dtype(name)
    if same_dtype and bytes(raw(x)) == bytes(raw(y)):
        return None
    gap = (_wide(x) - _wide(y)).abs()
    elements, total = int((gap != 0).sum()), gap.numel()
    max_abs = float(gap.max()) if total else 0.0
    text = f"{elements} of {total} elements, at most {max_abs:.6g}"
    if same_dtype:
        return Difference(name, "values", text, elements, max_abs)
    dtypes = f"{a.stored_dtype(name)} and {b.stored_dtype(name)}"
    return Difference(name, "dtype", f"{dtypes}; values differ in {text}", elements, max_abs)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float64)
