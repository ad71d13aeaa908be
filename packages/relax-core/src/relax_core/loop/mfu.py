"""What the trainer's devices could do at most, for the MFU of a run's metrics.

MFU (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B): operations that the model needs, none for
what is computed again, over what the devices could have done in the time.
"""

import logging
from collections.abc import Callable

from relax_core.config.root import RelaxConfig
from relax_core.plan.devices import DEVICES

_log = logging.getLogger(__name__)


def spec_of(device_name: str) -> str | None:
    """The row of the plan's device table for a driver's name ("NVIDIA H200"); None if none fits."""
    words = device_name.lower()
    return next((name for name in DEVICES if name in words.replace(" ", "-").split("-")), None)


def peak_flops(config: RelaxConfig, device_name: Callable[[], str]) -> float | None:
    """Operations a second of all trainer ranks together, dense bfloat16; None where that is not known.

    Args:
        config: the resolved config.
        device_name: asks the driver; called only where this process trains on an accelerator.
    """
    if config.trainer.precision != "bf16" or config.cluster.mode == "ray":
        return None
    given = device_name()
    name = spec_of(given)
    if name is None:
        _log.info("no MFU: %s is not among the devices of the plan's table (%s)", given, ", ".join(DEVICES))
        return None
    return DEVICES[name].flops * config.cluster.trainer_ranks


def accelerator_name() -> str:
    """The name of this process's CUDA device, "cpu" without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
