"""`PackedLayout`: the only place that knows padding, alignment and order of a packed micro-batch.

Axes: T packed positions of the whole row (padding included), N samples.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from math import lcm
from typing import TypeVar

import numpy as np
import torch
from relax_kernels import CuSeqlens, upload
from torch import Tensor

from relax_core.packing.zigzag import zigzag_index

Table = TypeVar("Table")


class PackedLayout:
    """How N samples lie in one row of T positions, padding included, and which of them this rank holds.

    Computed once per micro-batch on the host and immutable. Model input, attention, delta net, labels,
    masks and log-probs all read it; nobody derives a length again. Padding is a segment of its own in
    `cu_seqlens`, so that no operator mixes it with a sample.

    Under context parallelism the row is the same on every rank, and each rank holds the part that `local`
    takes: two of 2 * `context_size` equal chunks (`relax_core.packing.zigzag`). Everything else here speaks
    of the whole row.

    Args:
        lengths: tokens of each sample, in packing order; each at least 1.
        pad_to_multiple: T is a multiple of this, and of 2 * `context_size` if that is above 1; what that adds
            lies at the row's end.
        context_size: ranks that share the row.
        context_rank: which of them this one is.
        row_length: None packs samples back to back. A number gives every sample as many positions, its
            padding behind it ("bshd": equal rows of a batch). The numbers are the same, the cost is not.

    Raises:
        ValueError: an argument is out of range, or a sample is longer than `row_length`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        pad_to_multiple: int = 1,
        context_size: int = 1,
        context_rank: int = 0,
        row_length: int | None = None,
    ) -> None:
        self.lengths = tuple(int(length) for length in lengths)
        self.context_size = context_size
        self.context_rank = context_rank
        self.row_length = row_length
        self._check(pad_to_multiple)
        self.total = sum(self.lengths)
        spaces = self.lengths if row_length is None else (row_length,) * len(self.lengths)
        *starts, end = accumulate(spaces, initial=0)
        self.starts = tuple(starts)
        multiple = lcm(pad_to_multiple, 2 * context_size if context_size > 1 else 1)
        self.padded_total = -(-end // multiple) * multiple
        self.local_total = self.padded_total // context_size
        owned = [
            (owner, tokens)
            for sample, (length, space) in enumerate(zip(self.lengths, spaces, strict=True))
            for owner, tokens in ((sample, length), (-1, space - length))
        ]
        owned = [(owner, tokens) for owner, tokens in [*owned, (-1, self.padded_total - end)] if tokens]
        self.cu_seqlens = CuSeqlens.from_lengths(tokens for _owner, tokens in owned)
        self._owners = [owner for owner, _tokens in owned]
        self._tables: dict[tuple[object, ...], object] = {}

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        *,
        pad_to_multiple: int = 1,
        context_size: int = 1,
        context_rank: int = 0,
        row_length: int | None = None,
    ) -> "PackedLayout":
        """The layout of samples of these `lengths`; see the class."""
        return cls(
            lengths,
            pad_to_multiple=pad_to_multiple,
            context_size=context_size,
            context_rank=context_rank,
            row_length=row_length,
        )

    def _check(self, pad_to_multiple: int) -> None:
        if not self.lengths:
            raise ValueError("lengths is empty: a micro-batch needs at least one sample")
        for i, length in enumerate(self.lengths):
            if length < 1:
                raise ValueError(f"lengths[{i}] is {length}: a sample needs a token")
            if self.row_length is not None and length > self.row_length:
                raise ValueError(
                    f"lengths[{i}] is {length}, more than row_length {self.row_length}: give longer rows, or "
                    "pack without row_length"
                )
        if pad_to_multiple < 1:
            raise ValueError(f"pad_to_multiple is {pad_to_multiple}: it must be at least 1")
        if not 0 <= self.context_rank < self.context_size:
            raise ValueError(
                f"context_rank {self.context_rank} does not exist among {self.context_size} ranks: give 0 to "
                f"{self.context_size - 1}"
            )

    @cached_property
    def position_ids_T(self) -> Tensor:
        """int64 [T] on the host: place inside the own sample; padding counts from 0 too."""
        return self.cu_seqlens.positions("cpu")

    @cached_property
    def sample_ids_T(self) -> Tensor:
        """int64 [T] on the host: index of the sample that owns a position, -1 for padding."""
        return torch.tensor(self._owners)[self.cu_seqlens.segment_ids("cpu")]

    @cached_property
    def local_index_T(self) -> Tensor:
        """int64 on the host: the row positions that this rank holds, in its order; all of them if alone."""
        return zigzag_index(self.padded_total, self.context_size, self.context_rank)

    def local(self, x_T: Tensor) -> Tensor:
        """This rank's part of a whole row [T, ...], on its device; the row itself if the rank is alone."""
        if self.context_size == 1:
            return x_T
        index_T = self.table(("local", x_T.device), lambda: upload(self.local_index_T, x_T.device))
        return x_T[index_T]

    def table(self, key: tuple[object, ...], build: Callable[[], Table]) -> Table:
        """What `build` made for this key the first time: for index tables of layers, per device.

        The key names the table and everything it depends on besides this layout.
        """
        if key not in self._tables:
            self._tables[key] = build()
        return self._tables[key]  # type: ignore[return-value]

    def ahead(self, distance: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Where the token `distance` places ahead in the same sample lies.

        Returns:
            (index_T int64, valid_T bool) on `device`, computed once per distance and device. Where the
            sample ends before that place, or at padding, valid is False and the index is 0.
        """

        def build() -> tuple[Tensor, Tensor]:
            index_T = torch.arange(distance, self.padded_total + distance)
            valid_T = torch.ones(self.padded_total, dtype=torch.bool)
            # Few positions see no further: the last of every sample, and padding.
            without_T = torch.from_numpy(self._last_positions(distance))
            valid_T[without_T] = False
            index_T[without_T] = 0
            return upload(index_T, device), upload(valid_T, device)

        return self.table(("ahead", distance, torch.device(device)), build)

    def _last_positions(self, distance: int) -> np.ndarray:
        """int64: positions without a token `distance` places ahead in the same sample, padding among them."""
        spaces, ends = np.asarray(self.cu_seqlens.lengths), np.asarray(self.cu_seqlens.host)[1:]
        counts = np.where(np.asarray(self._owners) < 0, spaces, np.minimum(spaces, distance))
        # For each segment the `counts` positions before its end: one range after another.
        begun = np.repeat(np.cumsum(counts) - counts, counts)
        return np.asarray(np.repeat(ends - counts, counts) + np.arange(counts.sum()) - begun)

    def pack(
        self, values: Sequence[Tensor | Sequence[float]], *, dtype: torch.dtype, fill: float = 0
    ) -> Tensor:
        """One value per token of each sample, as [T] on the host; padding holds `fill`.

        Raises:
            ValueError: the samples' lengths are not those of the layout.
        """
        given = tuple(len(value) for value in values)
        if given != self.lengths:
            wrong = next(
                (i for i, (a, b) in enumerate(zip(given, self.lengths, strict=False)) if a != b), len(given)
            )
            raise ValueError(
                f"values do not fit the layout from sample {wrong}: got {given}, expected {self.lengths}"
            )
        parts = [torch.as_tensor(value, dtype=dtype) for value in values]
        if self.row_length is None:
            tail = torch.full((self.padded_total - self.total,), fill, dtype=dtype)
            return torch.cat([*parts, tail])
        packed_T = torch.full((self.padded_total,), fill, dtype=dtype)
        packed_T[self.sample_ids_T >= 0] = torch.cat(parts)
        return packed_T

    def unpack(self, x_T: Tensor) -> list[Tensor]:
        """The samples' own stretches of `x_T` ([T, ...]), in packing order, without padding (views)."""
        if self.row_length is None:
            return list(torch.split(x_T[: self.total], list(self.lengths)))
        return [x_T[s : s + n] for s, n in zip(self.starts, self.lengths, strict=True)]

    def rows(self, x_T: Tensor) -> Tensor:
        """`x_T` ([T, ...]) as equal rows [N, row_length, ...] (a view).

        Raises:
            ValueError: the layout packs samples back to back.
        """
        if self.row_length is None:
            raise ValueError("samples lie back to back: build the layout with row_length for equal rows")
        samples = len(self.lengths)
        return x_T[: samples * self.row_length].view(samples, self.row_length, *x_T.shape[1:])

    def shift(self, x_T: Tensor, distance: int, *, fill: float = 0) -> Tensor:
        """`x_T` moved so that position t holds the value of the token `distance` places ahead.

        Positions without such a token hold `fill`. Shape and dtype stay.
        """
        index_T, valid_T = self.ahead(distance, x_T.device)
        return x_T[index_T].masked_fill(~valid_T, fill)
