"""Makes the imports of megatron-core, torch and transformers quick and quiet; takes effect when they come."""

import logging
import warnings
from types import ModuleType

from relax_core.upstream.compiler import COMPILERS
from relax_core.upstream.correction import Correction, Undo


def _compile_nothing(module: ModuleType) -> Undo:
    module.disable_jit_fuser()
    undo: Undo = module.enable_jit_fuser
    return undo


JIT_FUSER = Correction(
    name="no-compiler-at-import",
    module="megatron.core.jit",
    wrong="Importing megatron wraps small functions in torch.compile, which loads a compiler for 3 s; "
    "none of them is in our model's path.",
    versions=">=0.16.1,<0.17",
    apply=_compile_nothing,
    test="packages/relax-core/tests/upstream/test_import_time.py::test_importing_megatron_loads_no_compiler",
)


def prepare_import() -> None:
    """Keeps compilers away and drops notices of what is known: no Transformer Engine, no Apex."""
    for correction in (JIT_FUSER, *COMPILERS):
        correction.install()
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    # torch warns of a CUDA toolkit without a GPU when megatron looks for a compiler.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
