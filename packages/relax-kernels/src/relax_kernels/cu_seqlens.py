"""Cumulative sequence lengths of a packed batch: known on the host, cached on each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import index
from typing import TypeVar

import numpy as np
import torch

from relax_kernels.errors import InvalidInput
from relax_kernels.upload import upload

Table = TypeVar("Table")
MOST_TOKENS = 2**31 - 1
"""Offsets are int32 on a device."""


class CuSeqlens:
    """Where each of N sequences begins in a packed axis of T tokens.

    Built once per micro-batch from host integers, so that no kernel call has to wait for a device to learn a
    length. Tables derived from it (device copies, chunk grids, buckets) are kept in the object itself and die
    with it. Immutable; two objects are equal if their lengths are.
    """

    __slots__ = ("_tables", "host", "lengths")

    host: tuple[int, ...]
    """N + 1 offsets; the first is 0, the last is T."""
    lengths: tuple[int, ...]
    """N lengths in tokens; 0 is allowed."""

    def __init__(self, host: Iterable[int]) -> None:
        """Take N + 1 offsets.

        Raises InvalidInput if they are not whole numbers, do not start with 0, decrease, or reach 2^31.
        """
        self.host = _whole("offsets", host)
        if not self.host or self.host[0] != 0:
            raise InvalidInput(f"CuSeqlens: offsets must start with 0, given {_short(self.host)}")
        self.lengths = tuple(end - start for start, end in zip(self.host, self.host[1:], strict=False))
        if any(length < 0 for length in self.lengths):
            raise InvalidInput(f"CuSeqlens: offsets must not decrease, given {_short(self.host)}")
        if self.total > MOST_TOKENS:
            raise InvalidInput(
                f"CuSeqlens: {self.total} tokens are too many, at most {MOST_TOKENS} are allowed"
            )
        self._tables: dict[tuple[object, ...], object] = {}

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> CuSeqlens:
        """Build from N lengths in tokens. Raises InvalidInput if one is negative or not a whole number."""
        given = _whole("lengths", lengths)
        if any(length < 0 for length in given):
            raise InvalidInput(f"CuSeqlens: lengths must not be negative, given {_short(given)}")
        return cls(accumulate(given, initial=0))

    @property
    def total(self) -> int:
        """T, the number of packed tokens."""
        return self.host[-1]

    @property
    def max_length(self) -> int:
        """Length of the longest sequence in tokens; 0 if there is none."""
        return max(self.lengths, default=0)

    def on(self, device: torch.device | str) -> torch.Tensor:
        """Return the N + 1 offsets as int32 on a device; the copy is made once."""
        return self.table(
            ("offsets", torch.device(device)), lambda: _as_tensor(self.host, torch.int32, device)
        )

    def segment_ids(self, device: torch.device | str) -> torch.Tensor:
        """Return for each of T tokens (int64) which sequence it belongs to."""

        def build() -> torch.Tensor:
            return _as_tensor(np.repeat(np.arange(len(self)), self.lengths), torch.int64, device)

        return self.table(("segments", torch.device(device)), build)

    def positions(self, device: torch.device | str) -> torch.Tensor:
        """Return for each of T tokens (int64) its place in its own sequence, from 0."""

        def build() -> torch.Tensor:
            starts = np.repeat(np.asarray(self.host[:-1]), self.lengths)
            return _as_tensor(np.arange(self.total) - starts, torch.int64, device)

        return self.table(("positions", torch.device(device)), build)

    def table(self, key: tuple[object, ...], build: Callable[[], Table]) -> Table:
        """Return what `build` made for this key the first time; for backends' derived index tables.

        The key must name the table, everything it depends on besides the lengths, and the device.
        """
        if key not in self._tables:
            # What is first made for inference must also serve training.
            with torch.inference_mode(False):
                self._tables[key] = build()
        return self._tables[key]  # type: ignore[return-value]

    def __reduce__(self) -> tuple[type[CuSeqlens], tuple[tuple[int, ...]]]:
        # Tables are rebuilt where they are needed; they may hold memory of this process's devices.
        return CuSeqlens, (self.host,)

    def __len__(self) -> int:
        """N, the number of sequences."""
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CuSeqlens) and self.host == other.host

    def __hash__(self) -> int:
        return hash(self.host)

    def __repr__(self) -> str:
        return f"CuSeqlens(lengths={_short(self.lengths)})"


def _whole(what: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(index(value) for value in values)
    except TypeError:
        raise InvalidInput(f"CuSeqlens: {what} must be whole numbers, given {values!r}") from None


def _as_tensor(values: object, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    return upload(torch.as_tensor(np.asarray(values, dtype=np.int64)).to(dtype), device)


def _short(values: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"({shown}, ... {len(values)} in all)" if len(values) > 8 else f"({shown})"
