"""How samples get from the driver to the trainer ranks.

Axes: T tokens of all samples back to back.
"""

import itertools
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import ray
import torch
from relax_rollout.pictures import PlacedPicture

from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.errors import ClusterError
from relax_core.cluster.packed_samples import PackedSamples

_PARTITION = "relax"


class SampleStream(Protocol):
    """Both ends; a ticket is small and says where the samples are."""

    def put(self, samples: PackedSamples) -> Any:
        """Offers samples, in the driver; the ticket for the ranks."""
        ...

    def take(self, ticket: Any) -> PackedSamples:
        """The samples, on a rank; any number of ranks, any number of times until `drop`."""
        ...

    def drop(self, ticket: Any) -> None:
        """Nobody takes them any more."""
        ...

    def close(self) -> None:
        """Ends the driver's end, and what it started."""
        ...


def stream_cpus(config: ClusterConfig) -> int:
    """CPUs that the processes of a stream take in Ray: TransferQueue's controller and two storage units."""
    return 0 if config.stream == "ray" else 3


def open_stream(config: ClusterConfig) -> SampleStream:
    """One end, in the driver or on a rank; Ray is initialised. The driver's is opened first.

    Raises:
        ClusterError: a package is not installed.
    """
    if config.stream == "ray":
        return RayStream()
    if find_spec("transfer_queue") is None:
        raise ClusterError(
            "cluster.stream is transfer_queue, and that package is not installed: "
            "pip install 'relax-core[transfer_queue]', or set cluster.stream to ray"
        )
    return TransferQueueStream()


class RayStream:
    """Through the shared memory of Ray, which hands a rank the samples themselves in place of the ticket."""

    def put(self, samples: PackedSamples) -> Any:
        """See `SampleStream`."""
        return ray.put(samples)

    def take(self, ticket: Any) -> PackedSamples:
        """See `SampleStream`."""
        samples: PackedSamples = ticket
        return samples

    def drop(self, ticket: Any) -> None:
        """See `SampleStream`: what nobody refers to goes."""

    def close(self) -> None:
        """See `SampleStream`."""


@dataclass(frozen=True)
class Rows:
    """Where samples lie in TransferQueue.

    Attributes:
        keys: of the rows, one sample each.
        lengths, groups: see `PackedSamples`.
        columns: names of its columns.
        pictures: of the samples; they go with the ticket, through the shared memory of Ray.
    """

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    columns: tuple[str, ...]
    pictures: tuple[tuple[PlacedPicture, ...], ...] = ()


class TransferQueueStream:
    """Through TransferQueue's storage units (Han et al. 2025, AsyncFlow, arXiv 2507.01663): a row a sample.

    On a cluster of many hosts samples then lie spread over hosts, and each rank fetches them itself.
    """

    def __init__(self) -> None:
        import transfer_queue

        self._queue = transfer_queue
        self._queue.init()
        self._numbers = itertools.count()

    def put(self, samples: PackedSamples) -> Rows:
        """See `SampleStream`."""
        from tensordict import TensorDict

        number = next(self._numbers)
        rows = Rows(
            tuple(f"{number}.{place}" for place in range(len(samples.lengths))),
            samples.lengths,
            samples.groups,
            tuple(samples.columns),
            samples.pictures,
        )
        values = {"tokens": samples.tokens_T, "mask": samples.mask_T} | {
            f"column.{name}": column_T for name, column_T in samples.columns.items()
        }
        fields = {
            name: torch.nested.as_nested_tensor(
                list(torch.split(torch.tensor(value_T), list(samples.lengths))), layout=torch.jagged
            )
            for name, value_T in values.items()
        }
        self._queue.kv_batch_put(
            keys=list(rows.keys),
            partition_id=_PARTITION,
            fields=TensorDict(fields, batch_size=[len(rows.keys)]),
        )
        return rows

    def take(self, ticket: Rows) -> PackedSamples:
        """See `SampleStream`."""
        found = self._queue.kv_batch_get(keys=list(ticket.keys), partition_id=_PARTITION)

        def flat(name: str) -> Any:
            return torch.cat([row.reshape(-1) for row in found[name].unbind()]).numpy()

        return PackedSamples(
            ticket.lengths,
            ticket.groups,
            flat("tokens"),
            flat("mask"),
            {name: flat(f"column.{name}") for name in ticket.columns},
            ticket.pictures,
        )

    def drop(self, ticket: Rows) -> None:
        """See `SampleStream`."""
        self._queue.kv_clear(keys=list(ticket.keys), partition_id=_PARTITION)

    def close(self) -> None:
        """See `SampleStream`."""
        self._queue.close()
