"""Accounts for every tensor of a checkpoint: both names, shapes, dtype, transform, partition, digest."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from relax_bridge.checkpoint import Checkpoint
from relax_bridge.digest import digest
from relax_bridge.errors import Problems
from relax_bridge.layout import Layout
from relax_bridge.model_map import ModelMap, mtp_layers_of
from relax_bridge.models import model_map
from relax_bridge.placement import Placement


@dataclass(frozen=True)
class HfTensor:
    """One stored tensor; `digest` is None where digests were not asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    nbytes: int
    digest: str | None


class Owner(NamedTuple):
    """A rank that holds (a share of) a tensor: the chunk and name it has there, and its shape."""

    rank: int
    chunk: int
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MegatronTensor:
    """One tensor of the trainer and the stored ones it is made of; a missing one is left out of `hf`."""

    megatron: str
    shape: tuple[int, ...]
    dtype: str | None
    transform: str
    partition: str
    hf: tuple[HfTensor, ...]
    owners: tuple[Owner, ...]


@dataclass(frozen=True)
class Audit:
    """The account of one checkpoint in one layout.

    Attributes:
        path: the directory.
        model: its `model_type`.
        mtp_layers: layers of multi-token prediction: what the config says, and what the names say.
        tensors: the table's tensors, in stream order.
        passthrough: stored tensors that the trainer does not hold.
        problems: what is missing, extra, mis-shaped or quantised.
    """

    path: str
    model: str
    mtp_layers: tuple[int, int]
    tensors: tuple[MegatronTensor, ...]
    passthrough: tuple[HfTensor, ...]
    problems: Problems

    @property
    def whole(self) -> bool:
        """Whether every tensor is covered exactly once, in both directions."""
        return not self.problems

    def totals(self) -> dict[str, int]:
        """Counts of names on both sides, parameters and bytes (of the covered tensors)."""
        held = {part.name: part for tensor in self.tensors for part in tensor.hf}
        return {
            "megatron_tensors": len(self.tensors),
            "hf_tensors": len(held),
            "passthrough_tensors": len(self.passthrough),
            "parameters": sum(prod(part.shape) for part in held.values()),
            "bytes": sum(part.nbytes for part in held.values()),
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = asdict(self) | {"totals": self.totals(), "whole": self.whole}
        for tensor in plain["tensors"]:
            tensor["owners"] = [Owner(*owner)._asdict() for owner in tensor["owners"]]
        return plain


def audit(
    checkpoint: Checkpoint,
    *,
    digests: bool = True,
    the_map: ModelMap | None = None,
    layout: Layout = Layout(),  # noqa: B008 - frozen
    report: Callable[[int, int], None] | None = None,
) -> Audit:
    """Accounts for a checkpoint without refusing anything that it holds.

    Args:
        checkpoint: an opened directory.
        digests: read every tensor and fingerprint it.
        the_map: the table to hold it against; by default that of its own config.
        layout: the ranks whose shares are told.
        report: called with (bytes read, bytes in all) as digests are made.

    Raises:
        BridgeError: no table for its config, or a layout that does not fit the model.
    """
    table = the_map or model_map(checkpoint.config, names=checkpoint.names)
    owners = _owners(Placement(table, layout))
    cache: dict[str, HfTensor] = {}
    total, read = sum(map(checkpoint.nbytes, checkpoint.names)), 0

    def stored(name: str) -> HfTensor:
        nonlocal read
        if name not in cache:
            cache[name] = HfTensor(
                name,
                checkpoint.shape(name),
                checkpoint.stored_dtype(name),
                checkpoint.file(name),
                checkpoint.nbytes(name),
                digest(checkpoint.tensor(name)) if digests else None,
            )
            read += checkpoint.nbytes(name)
            if report and digests:
                report(read, total)
        return cache[name]

    tensors = []
    for entry in table.entries:
        parts = tuple(stored(name) for name in entry.hf if name in checkpoint)
        dtypes = sorted({part.dtype for part in parts})
        tensors.append(
            MegatronTensor(
                entry.megatron,
                entry.megatron_shape,
                "/".join(dtypes) or None,
                entry.transform.name,
                entry.partition.describe(),
                parts,
                owners[entry.megatron],
            )
        )
    return Audit(
        str(checkpoint.path),
        table.model,
        (table.mtp_layers, mtp_layers_of(checkpoint.names)),
        tuple(tensors),
        tuple(stored(name) for name in checkpoint.names if table.passes_through(name)),
        table.problems(checkpoint),
    )


def _owners(placement: Placement) -> dict[str, tuple[Owner, ...]]:
    found: dict[str, list[Owner]] = {entry.megatron: [] for entry in placement.table.entries}
    for rank in range(placement.layout.world_size):
        for shard in placement.shards(rank):
            found[shard.entry.megatron].append(Owner(rank, shard.chunk, shard.name, shard.shape))
    return {name: tuple(owners) for name, owners in found.items()}
