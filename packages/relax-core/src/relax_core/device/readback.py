"""`Readback`: numbers on their way from the device to the host."""

import torch
from torch import Tensor


class Readback:
    """Tensors that are copied to the host while the device goes on.

    Reading them waits for the work that was queued before this was made, and for nothing that was queued
    behind it.

    Args:
        tensors: on one device; not changed in place afterwards.
    """

    def __init__(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        # Memory that a device writes to behind the host's back is pinned, which `non_blocking` sees to.
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._copied = None
        if device.type != "cpu":
            self._copied = torch.get_device_module(device).Event()
            self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> list[Tensor]:
        """The tensors on the host, as soon as they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors
