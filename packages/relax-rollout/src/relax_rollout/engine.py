"""The engine protocol: sampling, weight updates as transactions, and control."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from relax_rollout.requests import Completion, PauseMode, Request

if TYPE_CHECKING:
    from torch import Tensor

    from relax_rollout.weights.broadcast import Meeting
    from relax_rollout.weights.bucket import Bucket


class EngineStateError(RuntimeError):
    """A call that the engine's present state does not allow (closed, released, no update open)."""


class WeightsLostError(EngineStateError):
    """The servers came back without the weights of the last update; give them those once more."""


class EngineError(RuntimeError):
    """Sampling failed inside the engine; the affected requests raise it and the engine goes on."""


class TransferError(EngineError):
    """Weights were lost or damaged on their way: the old version serves; send the update again."""


class SharesRefusedError(EngineError):
    """Some shares of tensors are not all that an engine's ranks keep; send those tensors whole."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, as far as they were tried."""
        found = re.search(r"shares that are not enough: ([^;]*);", str(self))
        return tuple(found[1].split(", ")) if found else ()


class WeightUpdateError(ValueError):
    """An update with an unknown, missing, repeated or mis-shaped tensor; the old version keeps serving."""


@dataclass(frozen=True, slots=True)
class Health:
    """A snapshot of an engine.

    Args:
        ready: it takes requests now (open, not released).
        version: the version of the serving weights.
        running: requests whose tokens are being drawn.
        waiting: requests admitted to the queue and not yet started.
        paused: between :meth:`RolloutEngine.pause` and ``resume``.
        released: between ``release_memory`` and ``reclaim_memory``.
        updating: the version of an update that is open, or None.
        device: where the model is, for example "cpu" or "cuda:0".
        dtype: of the model's matrices, for example "float32".
        parameters: number of weights the engine serves with (a tied head counts once).
        unused_tensors: tensors of the last update that this engine accepts and does not use (``mtp.*``).
        last_error: the last failure inside the engine, or None.
    """

    ready: bool
    version: int
    running: int
    waiting: int
    paused: bool
    released: bool
    updating: int | None
    device: str
    dtype: str
    parameters: int
    unused_tensors: int
    last_error: str | None


@runtime_checkable
class RolloutEngine(Protocol):
    """What every engine does; the same contract suite runs on each.

    All calls are coroutines of one event loop. A weight update is a transaction: ``begin_update``, any number
    of ``load``, ``end_update``; until the last returns, and whenever one of them is refused, the old version
    serves.
    """

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Draw a completion for each request; the answer has the requests' order.

        Waits while the engine is paused. Concurrent calls share the batch.

        Raises:
            InvalidRequestError: a token id outside the vocabulary, prompt plus ``max_new_tokens`` beyond the
                context, or an id already in flight; nothing is drawn for any request of the call.
            EngineStateError: the engine is closed or its memory is released.
            EngineError: sampling failed, for example on weights that are not finite.
        """
        ...

    async def begin_update(self, version: int, kept: Collection[str] = ()) -> Mapping[str, str]:
        """Open an update that will serve as ``version`` (at least 0).

        An update that was never ended is dropped with a warning.

        Args:
            version: the new one.
            kept: Hugging Face names of weights that stay as they serve, such as those of a frozen vision
                tower: they do not come, and :meth:`end_update` gives their digests with the others'. Names
                that the engine does not serve with are ignored.

        Returns:
            Hugging Face name -> dtype in which the engine serves that weight, for example "bfloat16"; cast
            to it before computing the digest that :meth:`end_update` should give.

        Raises:
            EngineStateError: closed or released.
            ValueError: the version is not a whole number of at least 0.
        """
        ...

    async def load(self, bucket: "Mapping[str, Tensor]") -> None:
        """Take over some tensors by their Hugging Face names, of any floating dtype, on any device.

        The tensors may change once this returns. Each name comes once; the order is free.

        Raises:
            WeightUpdateError: a name unknown, given before or said to be kept, or another shape. The update
                is dropped.
            EngineStateError: no update is open.
        """
        ...

    async def end_update(self) -> Mapping[str, str]:
        """Make the loaded tensors serve, all at once, and give a digest of every weight inside the engine.

        Completions in flight go on under the new weights, their context recomputed; each token carries the
        version that drew it.

        Returns:
            Hugging Face name -> :func:`relax_rollout.tensor_digest` of the weight as it serves (in the
            engine's dtype).

        Raises:
            WeightUpdateError: a weight is missing. The update is dropped.
            EngineStateError: no update is open.
        """
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop drawing tokens once the present step ends; new requests wait.

        Args:
            mode: what becomes of the requests in flight: "keep" leaves them with their caches, "recompute"
                drops the caches (the tokens stay and are computed anew after :meth:`resume`), "abort" ends
                them with what they have.
        """
        ...

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, or all, with what they have, as "abort"; unknown ids are ignored."""
        ...

    async def release_memory(self) -> None:
        """Give up the device memory of weights and caches; until reclaimed, requests are refused.

        Raises:
            EngineStateError: requests are in flight and the engine is not paused.
        """
        ...

    async def reclaim_memory(self) -> None:
        """Take the memory back, with the weights as they were; paused requests are recomputed."""
        ...

    async def health(self) -> Health:
        """The engine's state now; never raises, also after :meth:`close`."""
        ...

    async def close(self) -> None:
        """End the engine; requests in flight raise EngineStateError. A second call does nothing."""
        ...


@runtime_checkable
class PackedLoading(Protocol):
    """What an engine does too whose processes open buckets themselves: the bytes do not pass through it."""

    @property
    def receivers(self) -> int:
        """Processes that take part in a broadcast."""
        ...

    async def sees(self, handles: Sequence[str]) -> bool:
        """Whether every process can open its sender's memory; see :mod:`relax_rollout.weights.probe`.

        Args:
            handles: one for all processes, or one for each tensor-parallel rank of a server.
        """
        ...

    async def connect(self, meeting: "Meeting", first_rank: int) -> None:
        """Take part in a group for broadcasts.

        Args:
            meeting: where it comes together.
            first_rank: of this engine's processes in it; they follow one another.

        Raises:
            TransferError: it did not come together in time.
        """
        ...

    async def load_packed(self, parts: "Sequence[Bucket]") -> None:
        """:meth:`RolloutEngine.load` of tensors that lie in a bucket.

        Args:
            parts: one bucket for all processes, or one for each tensor-parallel rank of a server.

        Raises:
            WeightUpdateError: see :meth:`RolloutEngine.load`.
            TransferError: the bytes did not arrive as they were sent.
        """
        ...
