"""Megatron's recompute of norms without Transformer Engine: a flag that is on when it says off."""

import functools
import importlib.util
from types import ModuleType
from typing import Any

from relax_core.upstream.correction import Correction, Undo, replace_attribute


def _read_flag(module: ModuleType) -> Undo:
    def make(init: Any) -> Any:
        @functools.wraps(init)
        def corrected(self: Any, fp8: Any = False) -> None:
            init(self, fp8)
            self.fp8 = bool(fp8)

        return corrected

    return replace_attribute(module.CheckpointWithoutOutput, "__init__", make)


NORM_RECOMPUTE = Correction(
    name="recompute-without-fp8",
    module="megatron.core.tensor_parallel.random",
    wrong="Recomputing norms raises NameError: CheckpointWithoutOutput takes fp8=False for True and asks "
    "Transformer Engine for its state.",
    versions=">=0.16.1,<0.17",
    apply=_read_flag,
    test="packages/relax-core/tests/upstream/test_norm_recompute.py::"
    "test_norms_are_recomputed_without_transformer_engine",
    needed=lambda: importlib.util.find_spec("transformer_engine") is None,
)
