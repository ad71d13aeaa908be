"""What every process of a cluster does first, and once it is ready."""

import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.config.root import RelaxConfig
from relax_core.device.registry import get_device


def prepare_process(config: RelaxConfig, threads: int) -> None:
    """Threads as in a run of one process, and a log that Ray keeps beside its own.

    Nothing is collected as garbage until `process_ready`.

    Args:
        config: the run's.
        threads: of torch's operators.
    """
    gc.disable()
    import torch

    logging.basicConfig(stream=sys.stderr, level=config.run.log_level.upper())
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def host_name() -> str:
    """Of this host, the same in all of its processes; a container that starts elsewhere has another one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def process_ready() -> None:
    """The model is loaded: what there is stays, and is left out of every search for garbage."""
    gc.freeze()
    gc.enable()


def show_devices(device: str, visible: Sequence[str]) -> None:
    """Lets this process, and those that it starts, see some devices of the host; called before it looks.

    Args:
        device: their kind, such as "cuda".
        visible: their numbers.
    """
    variable = get_device(device).visible_variable
    assert variable is not None, "devices that are shared have numbers"
    os.environ[variable] = ",".join(visible)
