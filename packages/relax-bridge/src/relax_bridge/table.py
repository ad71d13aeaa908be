"""A row of a weight map, and the concrete entries it stands for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from relax_bridge.partition import Partition, Replicated
from relax_bridge.transforms import Identity, Shape, Transform


@dataclass(frozen=True)
class Entry:
    """One Megatron tensor and the Hugging Face tensors it is made of."""

    megatron: str
    hf: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    transform: Transform
    partition: Partition

    @property
    def megatron_shape(self) -> Shape:
        """The full (unsharded) Megatron shape."""
        return self.transform.fused_shape(self.hf_shapes)


@dataclass(frozen=True)
class Row:
    """One line of a table: a Megatron name pattern and its Hugging Face names.

    Patterns hold `{i}` (and later `{e}`) for the indices listed in `at`; an empty `at` is one tensor.
    `hf` and `hf_shapes` run in the order the transform takes its parts.
    """

    megatron: str
    hf: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    transform: Transform
    partition: Partition
    at: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

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
            )


def one(
    megatron: str, hf: str, shape: Shape, partition: Partition | None = None, **at: tuple[int, ...]
) -> Row:
    """A row whose Megatron tensor is the Hugging Face tensor unchanged."""
    return Row(megatron, (hf,), (shape,), Identity(), partition or Replicated(), at)
