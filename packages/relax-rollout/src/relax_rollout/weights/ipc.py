"""The path by shared device memory: a bucket of another process on the same device, opened and not copied."""

import base64
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor


def ipc_handle(buffer: Tensor) -> str:
    """What another process needs to open a buffer, which must live until that process is done with it."""
    found: Any = reduce_tensor
    return base64.b64encode(pickle.dumps(found(buffer))).decode()


class IpcSource:
    """A bucket in device memory of another process: opened once, however many models load from it.

    Args:
        handle: of :func:`ipc_handle`, from a process that is trusted: opening it unpickles it.
    """

    def __init__(self, handle: str) -> None:
        self._handle = handle

    def fetch(self, nbytes: int, device: torch.device) -> Tensor:
        """See :class:`relax_rollout.weights.receiver.Source`.

        Raises:
            ValueError: the buffer is shorter than was announced.
        """
        rebuild, arguments = pickle.loads(base64.b64decode(self._handle))
        opened: Tensor = rebuild(*arguments)
        if opened.numel() < nbytes:
            raise ValueError(f"the shared buffer has {opened.numel()} bytes; {nbytes} were announced")
        return opened
