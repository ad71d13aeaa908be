"""MindSpeed core_r0.16.0: loaded and repatched in the order that it needs, and corrected where it is wrong.

MindSpeed replaces parts of megatron-core when `mindspeed.megatron_adaptor` is imported. It then reads the
process's command line for switches, and what was built before keeps what it got. So it is loaded before any
model spec is made and before Megatron is initialised, sees no argument of ours, and is told the parallel
sizes by `repatch`. Relax runs on the NPU without it: its modules are its own.
"""

import importlib
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from relax_npu.upstream.mindspeed_fixes import LATE_DEFAULT, OF_KERNELS

ADAPTOR = "mindspeed.megatron_adaptor"
_last: dict[str, Any] | None = None


class MindSpeedOrderError(RuntimeError):
    """MindSpeed would be loaded or repatched after what it should have changed."""


def load(arguments: Mapping[str, Any] | Namespace, *, initialised: bool) -> ModuleType | None:
    """Loads MindSpeed with our arguments, or does nothing where it is not installed. Idempotent.

    Args:
        arguments: MindSpeed's switches by name; what its command line would have said.
        initialised: whether Megatron's parallel groups exist already.

    Returns:
        The adaptor, or None without MindSpeed.

    Raises:
        MindSpeedOrderError: the switches change although Megatron is initialised.
        FixMismatchError: another MindSpeed than the corrections were made for.
    """
    global _last
    if importlib.util.find_spec("mindspeed") is None:
        return None
    wanted = as_dict(arguments)
    if _last == wanted and ADAPTOR in sys.modules:
        return sys.modules[ADAPTOR]
    if initialised:
        raise MindSpeedOrderError(
            "MindSpeed's switches were set after Megatron was initialised: specs and groups keep what they "
            "were built with. Call load() before initialise() and before a model is built"
        )
    LATE_DEFAULT.install()
    with without_command_line():
        adaptor = importlib.import_module(ADAPTOR)
    adaptor.repatch(wanted)
    if importlib.util.find_spec("triton") is not None:
        # Without triton MindSpeed's kernels cannot be imported either.
        for fix in OF_KERNELS:
            fix.install()
    _last = wanted
    return adaptor


def as_dict(arguments: Any) -> dict[str, Any]:
    """Plain values of a mapping, a namespace or an OmegaConf container (which upstream cannot pickle)."""
    named = vars(arguments) if isinstance(arguments, Namespace) else arguments
    return {str(name): _plain(value) for name, value in named.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return as_dict(value)
    if type(value).__module__.partition(".")[0] == "omegaconf":
        return [_plain(item) for item in value]
    return value


@contextmanager
def without_command_line() -> Iterator[None]:
    """Hides the process's arguments: MindSpeed parses them and makes every unknown one a switch."""
    kept = sys.argv
    sys.argv = kept[:1]
    try:
        yield
    finally:
        sys.argv = kept
