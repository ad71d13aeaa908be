"""What the trainer's devices could do at most, for the MFU of a run's metrics.

MFU (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B): operations that the model needs, none for
what is computed again, over what the devices could have done in the time.
"""

import logging
import re
from collections.abc import Callable

from relax_core.config.root import RelaxConfig
from relax_core.plan.devices import DEVICES

_log = logging.getLogger(__name__)


# Of the 910 family, 93xx are the 910C, whose cards show their two dies as two devices.
_DIE_OF_A_910C = re.compile(r"ascend910_93\d\d")


def spec_of(device_name: str) -> str | None:
    """The row of the plan's device table for a driver's name ("NVIDIA H200"); None if none fits."""
    words = device_name.lower()
    if _DIE_OF_A_910C.fullmatch(words):
        return "910c-die"
    return next((name for name in DEVICES if name in words.replace(" ", "-").split("-")), None)


def peak_flops(config: RelaxConfig, device_name: Callable[[], str]) -> float | None:
    """Operations a second of all trainer ranks together, in the trainer's precision; None where not known.

    Args:
        config: the resolved config.
        device_name: asks the driver of the first rank; called only where it may be an accelerator.
    """
    if config.run.device == "cpu":
        return None
    given = device_name()
    name = spec_of(given)
    if name is None:
        _log.info("no MFU: %s is not among the devices of the plan's table (%s)", given, ", ".join(DEVICES))
        return None
    spec = DEVICES[name]
    rate = spec.flops if config.trainer.precision == "bf16" else spec.flops_fp32
    if rate is None:
        _log.info("no MFU: the plan's table has no rate of %s in %s", name, config.trainer.precision)
        return None
    return rate * config.cluster.trainer_ranks
