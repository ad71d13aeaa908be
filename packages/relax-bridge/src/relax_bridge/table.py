"""A row of a weight map, and the concrete entries it stands for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from relax_bridge.partition import Partition, Replicated
from relax_bridge.transforms import Identity, Shape, Transform


@dataclass(frozen=True)
class Entry:
    """One Megatron tensor and the Hugging Face tensors it is made of.

    Attributes:
        megatron: its name.
        hf: the Hugging Face names, in the order the transform takes them.
        hf_shapes: the shapes of those tensors in the checkpoint.
        transform: how the parts become one tensor.
        partition: how the Megatron tensor lies over tensor-parallel ranks.
        stack_index: where the Hugging Face tensors stack several entries along axis 0 (packed experts), the
            position of this one; None where an entry takes its tensors whole.
        expert: the expert this tensor belongs to; None outside of experts.
    """

    megatron: str
    hf: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    transform: Transform
    partition: Partition
    stack_index: int | None = None
    expert: int | None = None

    @property
    def part_shapes(self) -> tuple[Shape, ...]:
        """The shapes the transform takes: the checkpoint's, without the axis of a stack."""
        return self.hf_shapes if self.stack_index is None else tuple(shape[1:] for shape in self.hf_shapes)

    @property
    def megatron_shape(self) -> Shape:
        """The full (unsharded) Megatron shape."""
        return self.transform.fused_shape(self.part_shapes)


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

    def entries(self) -> Iterator[Entry]:
        """The concrete tensors, in index order."""
        for values in product(*self.at.values()):
            index = dict(zip(self.at, values, strict=True))
            yield Entry(
                self.megatron.format(**index),
                tuple(name.format(**index) for name in self.hf),
                self.hf_shapes,
                self.transform,
                self.partition,
                index[self.stacked] if self.stacked else None,
                index.get("e"),
            )


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
