"""All weights of a trainer's process in memory that engines open, packed anew in the same place each time."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from relax_rollout.digest import TensorDigests
from relax_rollout.weights.bucket import Bucket, Entry, Share, torch_dtype, views
from relax_rollout.weights.ipc import IpcSender, finish
from relax_rollout.weights.recorded import Recorded


class Packing:
    """Weights as buckets of few memories: what lies in lent memory there, the rest packed.

    Args:
        device: of the weights.
        lent: see :class:`relax_rollout.weights.ipc.IpcSender`.
        recorded: what exports compute they compute from lent memory alone, by the same kernels each time:
            where the device can, that is recorded, see :class:`relax_rollout.weights.recorded.Recorded`.
    """

    def __init__(self, device: torch.device, *, lent: Iterable[Tensor] = (), recorded: bool = False) -> None:
        self._device, self._ipc = device, IpcSender(lent)
        self._recorded = recorded
        self._place: Callable[[], list[tuple[list[Entry], Tensor]]]
        self._dtypes: Mapping[str, str] | None = None
        self._placed: list[tuple[list[Entry], Tensor]] = []
        self._buckets: list[Bucket] = []
        self._digests = TensorDigests({})

    def __call__(
        self,
        export: Callable[[], Iterable[Mapping[str, Tensor]]],
        dtypes: Mapping[str, str],
        shares: Mapping[str, Share] | None = None,
        *,
        digests: bool = True,
    ) -> list[Bucket]:
        """Pack the present weights, which stay as they are until the update has ended.

        Args:
            export: gives the weights by name, some at a time, computed while it is asked; not called where
                they were recorded, and once more where they could not be.
            dtypes: of the engines' weights, by name; a name without one travels as it is. Others than at the
                last call are recorded anew.
            shares: which part of a whole each of those is that is one; read as ``export`` goes on.
            digests: of every tensor, for receivers to compare.
        """
        self._asked = export, dtypes, {} if shares is None else shares
        if dtypes != self._dtypes:
            self._dtypes = dict(dtypes)
            self._place = Recorded(self._device, self._place_all) if self._recorded else self._place_all
        placed = self._place()
        if placed is not self._placed:
            self._placed = placed
            self._buckets = [self._ipc.bucket(entries, buffer) for entries, buffer in placed]
            self._digests = TensorDigests(
                {e.name: view for es, buffer in placed for e, view in zip(es, views(es, buffer), strict=True)}
            )
        if not digests:
            finish(self._device)
            return self._buckets
        found = self._digests()
        return [bucket.with_digests(found) for bucket in self._buckets]

    def _place_all(self) -> list[tuple[list[Entry], Tensor]]:
        export, dtypes, shares = self._asked
        self._ipc.release()
        placed: dict[int, tuple[list[Entry], Tensor]] = {}
        for tensors in export():
            cast = {n: t.to(torch_dtype(dtypes[n])) if n in dtypes else t for n, t in tensors.items()}
            for entries, buffer in self._ipc.place(cast):
                told = [replace(entry, share=shares.get(entry.name)) for entry in entries]
                placed.setdefault(buffer.data_ptr(), ([], buffer))[0].extend(told)
        return list(placed.values())

    def close(self) -> None:
        """Give up the memory."""
        self._ipc.close()
