"""`upload`: a copy from the host to a device that the host does not wait for."""

from __future__ import annotations

import torch


def upload(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return x on a device.

    From pageable memory CUDA copies only once all the work before it is done, and the host waits for that: no
    kernel of a step would be launched before the step before has ended. From pinned memory it need not wait.

    Args:
        x: any tensor; when it lies on the host it must not be changed afterwards.
        device: where to.
    """
    target = torch.device(device)
    if target.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(target, non_blocking=True)
    return x.to(target)
