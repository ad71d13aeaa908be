"""A row of a weight map, and the concrete entries it stands for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import NamedTuple

from relax_bridge.partition import Partition, Replicated
from relax_bridge.transforms import Identity, Shape, Transform


@dataclass(frozen=True)
class Row:
    """One line of a table: a Megatron name pattern and its Hugging Face names.

    Attributes:
        megatron: the name, with `{i}` for a layer and `{e}` for an expert.
        hf: Hugging Face names, patterns alike, in the order the transform takes them.
        hf_shapes: their shapes.
        transform: how they become one tensor.
        partition: how the Megatron tensor lies over tensor-parallel ranks.
        at: the values of each index of the patterns; empty for a row of one tensor.
        stacked: the index that picks along axis 0 of the Hugging Face tensors (packed experts).
    """

    megatron: str
    hf: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    transform: Transform
    partition: Partition
    at: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stacked: str | None = None

    @cached_property
    def part_shapes(self) -> tuple[Shape, ...]:
        """The shapes the transform takes: the checkpoint's, without the axis of a stack."""
        return self.hf_shapes if self.stacked is None else tuple(shape[1:] for shape in self.hf_shapes)

    @cached_property
    def megatron_shape(self) -> Shape:
        """The full (unsharded) Megatron shape of each of its tensors."""
        return self.transform.fused_shape(self.part_shapes)

    def entries(self) -> Iterator["Entry"]:
        """The concrete tensors, in index order."""
        name, hf = self.megatron.format, [name.format for name in self.hf]
        for i, e in product(self.at.get("i", (None,)), self.at.get("e", (None,))):
            yield Entry(self, name(i=i, e=e), tuple([one(i=i, e=e) for one in hf]), i, e)


class Entry(NamedTuple):
    """One Megatron tensor and the Hugging Face tensors it is made of.

    Attributes:
        row: the line of the table it comes from.
        megatron: its name.
        hf: the Hugging Face names, in the order the transform takes them.
        layer: the layer of its stack (trunk or MTP); None outside of layers.
        expert: the expert this tensor belongs to; None outside of experts.
    """

    row: Row
    megatron: str
    hf: tuple[str, ...]
    layer: int | None
    expert: int | None

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the Hugging Face tensors in the checkpoint."""
        return self.row.hf_shapes

    @property
    def part_shapes(self) -> tuple[Shape, ...]:
        """The shapes the transform takes: the checkpoint's, without the axis of a stack."""
        return self.row.part_shapes

    @property
    def megatron_shape(self) -> Shape:
        """The full (unsharded) Megatron shape."""
        return self.row.megatron_shape

    @property
    def transform(self) -> Transform:
        """How the parts become one tensor."""
        return self.row.transform

    @property
    def partition(self) -> Partition:
        """How the Megatron tensor lies over tensor-parallel ranks."""
        return self.row.partition

    @property
    def stack_index(self) -> int | None:
        """Where the Hugging Face tensors stack several entries along axis 0 (packed experts), its
        position."""
        return None if self.row.stacked is None else self.expert


@dataclass(frozen=True)
class Place:
    """Where a block of rows sits: name prefixes on both sides and the layers it is repeated for."""

    megatron: str
    hf: str
    layers: tuple[int, ...] = ()

    def under(self, megatron: str, hf: str) -> "Place":
        """A place below this one."""
        return Place(self.megatron + megatron, self.hf + hf, self.layers)

    def row(
        self,
        megatron: str,
        hf: str | tuple[str, ...],
        shapes: Shape | tuple[Shape, ...],
        partition: Partition = Replicated(),  # noqa: B008 - frozen and without fields
        transform: Transform = Identity(),  # noqa: B008
        *,
        experts: int = 0,
        stacked: bool = False,
    ) -> Row:
        """A row here; a single name with a single shape needs no tuples.

        `experts` adds the index `{e}`; with `stacked` the Hugging Face tensors hold all of them along axis 0.
        """
        names = (hf,) if isinstance(hf, str) else hf
        sizes: tuple[Shape, ...] = (shapes,) if isinstance(hf, str) else shapes  # type: ignore[assignment]
        at: dict[str, tuple[int, ...]] = {"i": self.layers} if "{i}" in self.megatron else {}
        if experts:
            at["e"] = tuple(range(experts))
        return Row(
            self.megatron + megatron,
            tuple(self.hf + name for name in names),
            sizes,
            transform,
            partition,
            at,
            "e" if stacked else None,
        )
