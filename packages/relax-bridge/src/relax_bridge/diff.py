"""Names the tensors in which two checkpoints differ, and by how much."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from relax_bridge.checkpoint import Checkpoint
from relax_bridge.safetensors_writer import raw

# Elements that are compared at a time: a tensor of any size needs little memory beside itself.
_CHUNK = 2**22


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both.

    Attributes:
        name: the Hugging Face name.
        kind: `only in A`, `only in B`, `shape`, `dtype` or `values`.
        detail: for people.
        elements: how many elements differ: in their bits (`values`), or in value (`dtype`).
        max_abs: the largest absolute difference of those, in float64; NaN where either side holds a NaN.
    """

    name: str
    kind: str
    detail: str
    elements: int | None = None
    max_abs: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN and no infinity: None stands for either."""
        finite = self.max_abs is not None and math.isfinite(self.max_abs)
        return asdict(self) | {"max_abs": self.max_abs if finite else None}


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
    x, y = a.tensor(name).reshape(-1), b.tensor(name).reshape(-1)
    same_dtype = a.stored_dtype(name) == b.stored_dtype(name)
    elements, gaps = 0, [torch.zeros((), dtype=torch.float64)]
    for at in range(0, len(x), _CHUNK):
        u, v = x[at : at + _CHUNK], y[at : at + _CHUNK]
        changed = _other_bits(u, v) if same_dtype else _other_values(u, v)
        if changed.any():
            elements += int(changed.sum())
            gaps.append((_wide(u[changed]) - _wide(v[changed])).abs().max())
    if same_dtype and not elements:
        return None
    max_abs = float(torch.stack(gaps).max())
    text = f"{elements} of {x.numel()} elements, at most {max_abs:.6g}"
    if same_dtype:
        return Difference(name, "values", text, elements, max_abs)
    dtypes = f"{a.stored_dtype(name)} and {b.stored_dtype(name)}"
    return Difference(name, "dtype", f"{dtypes}; values differ in {text}", elements, max_abs)


def _other_bits(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(raw(x) != raw(y)).view(-1, x.element_size()).any(dim=1)


def _other_values(x: Tensor, y: Tensor) -> Tensor:
    x, y = _wide(x), _wide(y)
    return (x != y) & ~(x.isnan() & y.isnan())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
