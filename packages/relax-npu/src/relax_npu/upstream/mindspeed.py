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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from types import ModuleType
from typing import Any

from relax_npu.upstream.fix import Fix, FixMismatchError, replace

ADAPTOR = "mindspeed.megatron_adaptor"
_VERSIONS = ("0.16.0",)
_TESTS = "packages/relax-npu/tests/upstream/test_mindspeed.py"
_KERNEL_WARPS = 4
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


def _bind_defaults(module: ModuleType) -> None:
    """Gives each mutable default a factory of its own.

    Upstream writes `default_factory=lambda: value` in a loop, so that all of them return the last one.
    """
    usual: Callable[..., Any] = module.transformer_config_init_subclass

    def corrected(cls: type, **kwargs: Any) -> None:
        defaults = {**vars(module.get_full_args()), **kwargs}
        before = set(vars(cls))
        usual(cls, **kwargs)
        for name in set(vars(cls)) - before:
            value = defaults.get(name)
            if isinstance(value, list | dict | set | bytearray):
                setattr(cls, name, field(default_factory=_copies_of(value)))

    replace(module, "transformer_config_init_subclass", corrected)


def _copies_of(value: Any) -> Callable[[], Any]:
    return lambda: type(value)(value)


def _first_configuration(module: ModuleType) -> None:
    """Leaves each autotuned kernel of the l2 norm one configuration.

    The search launches every configuration; some of them overflow the vector core's memory and abort.
    """
    for kernel in _autotuned(module):
        fitting = [c for c in kernel.configs if c.num_warps == _KERNEL_WARPS] or kernel.configs
        kernel.configs = fitting[:1]


def _key_without(*dropped: str) -> Callable[[ModuleType], None]:
    def apply(module: ModuleType) -> None:
        for kernel in _autotuned(module):
            kernel.keys = [name for name in kernel.keys if name not in dropped]

    return apply


def _autotuned(module: ModuleType) -> list[Any]:
    found = [x for x in vars(module).values() if hasattr(x, "configs") and hasattr(x, "keys")]
    if not found:
        raise FixMismatchError(f"{module.__name__} has no autotuned kernel; not corrected")
    return found


LATE_DEFAULT = Fix(
    name="mindspeed-late-default",
    distribution="mindspeed",
    versions=_VERSIONS,
    module="mindspeed.core.megatron_basic.arguments_basic",
    expects={"transformer_config_init_subclass": ("cls",), "get_full_args": ()},
    wrong="every mutable default of a config's subclass becomes the last one's value",
    apply=_bind_defaults,
    test=f"{_TESTS}::test_each_mutable_default_is_its_own",
)
L2NORM_AUTOTUNE = Fix(
    name="mindspeed-l2norm-autotune",
    distribution="mindspeed",
    versions=_VERSIONS,
    module="mindspeed.ops.triton.l2norm",
    expects={},
    wrong="the search for the fastest l2 norm runs configurations that overflow the vector core's memory",
    apply=_first_configuration,
    test=f"{_TESTS}::test_the_l2_norm_is_not_tuned",
)
DELTA_AUTOTUNE_KEY = Fix(
    name="mindspeed-delta-autotune-key",
    distribution="mindspeed",
    versions=_VERSIONS,
    module="mindspeed.ops.triton.chunk_delta_h",
    expects={},
    wrong="the delta rule's backward kernel is tuned again for each combination of options",
    apply=_key_without("USE_G", "IS_VARLEN"),
    test=f"{_TESTS}::test_options_are_no_reason_to_tune_again",
)
FIXES = (LATE_DEFAULT, L2NORM_AUTOTUNE, DELTA_AUTOTUNE_KEY)
