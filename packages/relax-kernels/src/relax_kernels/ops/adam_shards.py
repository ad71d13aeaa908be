"""`AdamShards`: the tensors that AdamW updates together.

N elements of one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar, cast

import torch

from relax_kernels.check import Checker

_STATES = (torch.float32, torch.bfloat16)
Table = TypeVar("Table")


class AdamShard(NamedTuple):
    """What AdamW keeps of one tensor, or of a part of it; see `adamw_step`.

    Attributes:
        weight_N: float32 or float64; bfloat16 with `rest_N`.
        grad_N: its gradient.
        mean_N, square_N: running means.
        rest_N: int16, the lower half of a bfloat16 weight.
        seed: of the random rounding.
        first: place of the first element in the tensor of which this is a shard.
    """

    weight_N: torch.Tensor
    grad_N: torch.Tensor
    mean_N: torch.Tensor
    square_N: torch.Tensor
    rest_N: torch.Tensor | None = None
    seed: int = 0
    first: int = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its four or five tensors."""
        four = (self.weight_N, self.grad_N, self.mean_N, self.square_N)
        return four if self.rest_N is None else (*four, self.rest_N)


class AdamShards:
    """Shards of one kind on one device; checked once, here.

    Attributes:
        shards: as given.
        elements: their number of elements, summed.

    Raises:
        InvalidInput: there is none, or one does not fit in itself or not to the first in dtypes and device.
    """

    def __init__(self, shards: Iterable[AdamShard]) -> None:
        self.shards = tuple(shards)
        check = Checker("AdamShards")
        check.require(bool(self.shards), "at least one shard is needed")
        kind = _kind(self.shards[0])
        for index, shard in enumerate(self.shards):
            check = Checker(f"AdamShards: shard {index}")
            check_shard(check, shard)
            check.require(
                _kind(shard) == kind, f"its tensors are {_kind(shard)}, but those of shard 0 are {kind}"
            )
        self.elements = sum(shard.weight_N.numel() for shard in self.shards)
        self._tables: dict[str, object] = {}

    def table(self, key: str, build: Callable[[], Table]) -> Table:
        """Return what `build` made for this key the first time; for what backends derive from the shards."""
        if key not in self._tables:
            self._tables[key] = build()
        return cast(Table, self._tables[key])


def check_shard(check: Checker, shard: AdamShard) -> list[torch.Tensor]:
    """Refuse a shard whose tensors do not fit together; return them, the weight first."""
    weight_N = shard.weight_N
    check.tensor(
        "weight_N",
        weight_N,
        "N",
        dtypes=(torch.float32, torch.float64) if shard.rest_N is None else (torch.bfloat16,),
    )
    states = _STATES if weight_N.dtype in _STATES else (*_STATES, weight_N.dtype)
    check.tensor("grad_N", shard.grad_N, "N", dtypes=states)
    check.tensor("mean_N", shard.mean_N, "N", dtypes=states)
    check.tensor("square_N", shard.square_N, "N", same_dtype_as=shard.mean_N)
    if shard.rest_N is not None:
        check.tensor("rest_N", shard.rest_N, "N", dtypes=(torch.int16,))
    check.require(all(x.is_contiguous() for x in shard.tensors), "every tensor must be contiguous")
    check.whole("seed", shard.seed, 0, 2**32 - 1)
    check.whole("first", shard.first, 0)
    return list(shard.tensors)


def _kind(shard: AdamShard) -> str:
    kinds = [str(x.dtype).removeprefix("torch.") for x in shard.tensors]
    return f"{', '.join(kinds)} on {shard.weight_N.device}"
