"""`PackedLayout`: the only place that knows padding, alignment and order of a packed micro-batch.

Axes: T packed positions (padding included), N samples.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from relax_kernels import CuSeqlens
from torch import Tensor


class PackedLayout:
    """How N samples lie back to back in one row of T positions, tail padding included.

    Computed once per micro-batch on the host and immutable. Model input, attention, delta net, labels,
    masks and log-probs all read it; nobody derives a length again. Tail padding is one more segment of
    `cu_seqlens`, so that no operator mixes it with a sample.

    Args:
        lengths: tokens of each sample, in packing order; each at least 1.
        pad_to_multiple: T is the sum of `lengths` rounded up to a multiple of this.
    """

    def __init__(self, lengths: Sequence[int], *, pad_to_multiple: int = 1) -> None:
        lengths = tuple(int(length) for length in lengths)
        if not lengths:
            raise ValueError("lengths is empty: a micro-batch needs at least one sample")
        if min(lengths) < 1:
            raise ValueError(
                f"lengths[{lengths.index(min(lengths))}] is {min(lengths)}: a sample needs a token"
            )
        if pad_to_multiple < 1:
            raise ValueError(f"pad_to_multiple is {pad_to_multiple}: it must be at least 1")
        self.lengths = lengths
        self.total = sum(lengths)
        self.padded_total = -(-self.total // pad_to_multiple) * pad_to_multiple
        padding = self.padded_total - self.total
        self.cu_seqlens = CuSeqlens.from_lengths((*lengths, padding) if padding else lengths)
        self._ahead: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    @classmethod
    def build(cls, lengths: Sequence[int], *, pad_to_multiple: int = 1) -> "PackedLayout":
        """The layout of samples of these `lengths`; see the class."""
        return cls(lengths, pad_to_multiple=pad_to_multiple)

    @cached_property
    def position_ids_T(self) -> Tensor:
        """int64 [T] on the host: place inside the own sample; padding counts from 0 too."""
        return self.cu_seqlens.positions("cpu")

    @cached_property
    def sample_ids_T(self) -> Tensor:
        """int64 [T] on the host: index of the sample that owns a position, -1 for padding."""
        ids_T = self.cu_seqlens.segment_ids("cpu")
        return ids_T.masked_fill(ids_T >= len(self.lengths), -1)

    def ahead(self, distance: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Where the token `distance` places ahead in the same sample lies.

        Returns:
            (index_T int64, valid_T bool) on `device`, computed once per distance and device. Where the
            sample ends before that place, or at padding, valid is False and the index is 0.
        """
        key = (distance, torch.device(device))
        if key not in self._ahead:
            lengths_T = torch.tensor(self.cu_seqlens.lengths)[self.cu_seqlens.segment_ids("cpu")]
            valid_T = (self.position_ids_T + distance < lengths_T) & (self.sample_ids_T >= 0)
            index_T = (torch.arange(self.padded_total) + distance).where(valid_T, torch.tensor(0))
            self._ahead[key] = (index_T.to(device), valid_T.to(device))
        return self._ahead[key]

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
        packed_T = torch.full((self.padded_total,), fill, dtype=dtype)
        torch.cat([torch.as_tensor(value, dtype=dtype) for value in values], out=packed_T[: self.total])
        return packed_T

    def unpack(self, x_T: Tensor) -> list[Tensor]:
        """The samples' own stretches of `x_T` ([T, ...]), in packing order, without padding (views)."""
        return list(torch.split(x_T[: self.total], list(self.lengths)))

    def shift(self, x_T: Tensor, distance: int, *, fill: float = 0) -> Tensor:
        """`x_T` moved so that position t holds the value of the token `distance` places ahead.

        Positions without such a token hold `fill`. Shape and dtype stay.
        """
        index_T, valid_T = self.ahead(distance, x_T.device)
        return x_T[index_T].masked_fill(~valid_T, fill)
