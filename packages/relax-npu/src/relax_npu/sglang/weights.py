"""Copies that SGLang derives from weights, and that a weight update leaves behind.

Its attention on the NPU keeps a transposed convolution weight per layer (`_conv_weights_t`, in releases after
0.5.15) and never looks at the weight again. The copies are refilled in place: a captured graph reads them by
address.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from types import ModuleType
from typing import Any

from relax_npu.upstream.fix import replace

DERIVED = "_conv_weights_t"
SOURCE = "conv_weights"
UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


class DerivedWeightError(RuntimeError):
    """A derived copy has no source, or another shape than its source gives."""


def refresh_derived_weights(modules: Iterable[Any]) -> int:
    """Refills every derived copy among a model's modules from its source; returns how many there were.

    Raises:
        DerivedWeightError: a copy cannot be refilled; the engine must not answer with it.
    """
    count = 0
    for module in modules:
        copy = getattr(module, DERIVED, None)
        if copy is None:
            continue
        source = getattr(module, SOURCE, None)
        if source is None or tuple(source.shape[::-1]) != tuple(copy.shape):
            raise DerivedWeightError(f"{type(module).__name__}.{DERIVED} does not fit {SOURCE}")
        copy.copy_(source.transpose(0, 1))
        count += 1
    return count


def apply(module: ModuleType) -> None:
    """Corrects `sglang.srt.model_executor.model_runner`: every way of updating refills the copies."""
    runner = module.ModelRunner
    for name in UPDATES:
        setattr(runner, name, _refreshing(getattr(runner, name)))
    replace(module, "ModelRunner", runner)


def _refreshing(usual: Any) -> Any:
    @wraps(usual)
    def update(self: Any, *args: Any, **named: Any) -> Any:
        result = usual(self, *args, **named)
        refresh_derived_weights(self.model.modules())
        return result

    return update
