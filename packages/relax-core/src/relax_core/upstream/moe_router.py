"""Megatron's router without Transformer Engine: an import that leaves a name undefined."""

import importlib.util
from types import ModuleType

from relax_core.upstream.correction import Correction, Undo


def _define_gemm(module: ModuleType) -> Undo:
    if hasattr(module, "te_general_gemm"):
        return lambda: None
    module.te_general_gemm = None  # type: ignore[attr-defined]
    return lambda: delattr(module, "te_general_gemm")


ROUTER_GEMM = Correction(
    name="moe-router-gemm",
    module="megatron.core.transformer.moe.moe_utils",
    wrong="The router's linear raises NameError: its module defines te_general_gemm only where Transformer "
    "Engine imports.",
    versions=">=0.16.1,<0.17",
    apply=_define_gemm,
    test="packages/relax-core/tests/upstream/test_moe_router.py::test_the_router_runs_without_transformer_engine",
    needed=lambda: importlib.util.find_spec("transformer_engine") is None,
)
