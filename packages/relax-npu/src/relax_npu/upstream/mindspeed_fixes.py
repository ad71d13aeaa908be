"""Faults of MindSpeed core_r0.16.0, each a named correction at run time."""

from collections.abc import Callable
from dataclasses import field
from types import ModuleType
from typing import Any

from relax_npu.upstream.fix import Fix, FixMismatchError, replace

VERSIONS = ("0.16.0",)
_TESTS = "packages/relax-npu/tests/upstream/test_mindspeed.py"
# The l2 norm's one configuration: four warps, 32 rows at a time where it takes several.
_WARPS = 4
_ROWS = 32


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
        fitting = [c for c in kernel.configs if c.num_warps == _WARPS] or kernel.configs
        rows = [c for c in fitting if c.kwargs.get("BT", _ROWS) == _ROWS] or fitting
        kernel.configs = rows[:1]


def _key_without(*dropped: str) -> Callable[[ModuleType], None]:
    def apply(module: ModuleType) -> None:
        for kernel in _autotuned(module):
            kernel.keys = [name for name in kernel.keys if name not in dropped]

    return apply


def _autotuned(module: ModuleType) -> list[Any]:
    """The autotuners of a module's kernels, also those inside other decorators (`triton.heuristics`)."""
    found = []
    for value in vars(module).values():
        kernel = value
        while kernel is not None and not (hasattr(kernel, "configs") and hasattr(kernel, "keys")):
            kernel = getattr(kernel, "fn", None)
        if kernel is not None:
            found.append(kernel)
    if not found:
        raise FixMismatchError(f"{module.__name__} has no autotuned kernel; not corrected")
    return found


LATE_DEFAULT = Fix(
    name="mindspeed-late-default",
    distribution="mindspeed",
    versions=VERSIONS,
    module="mindspeed.core.megatron_basic.arguments_basic",
    expects={"transformer_config_init_subclass": ("cls",), "get_full_args": ()},
    wrong="every mutable default of a config's subclass becomes the last one's value",
    apply=_bind_defaults,
    test=f"{_TESTS}::test_each_mutable_default_is_its_own",
)
L2NORM_AUTOTUNE = Fix(
    name="mindspeed-l2norm-autotune",
    distribution="mindspeed",
    versions=VERSIONS,
    module="mindspeed.ops.triton.l2norm",
    expects={},
    wrong="the search for the fastest l2 norm runs configurations that overflow the vector core's memory",
    apply=_first_configuration,
    test=f"{_TESTS}::test_the_l2_norm_is_not_tuned",
)
DELTA_AUTOTUNE_KEY = Fix(
    name="mindspeed-delta-autotune-key",
    distribution="mindspeed",
    versions=VERSIONS,
    module="mindspeed.ops.triton.chunk_delta_h",
    expects={},
    wrong="the delta rule's backward kernel is tuned again for each combination of options",
    apply=_key_without("USE_G", "IS_VARLEN"),
    test=f"{_TESTS}::test_options_are_no_reason_to_tune_again",
)
OF_KERNELS = (L2NORM_AUTOTUNE, DELTA_AUTOTUNE_KEY)
FIXES = (LATE_DEFAULT, *OF_KERNELS)
