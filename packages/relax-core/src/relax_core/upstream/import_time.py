"""Makes `import megatron.core` quick and quiet. Takes effect on megatron's import, whenever that comes."""

import logging
import warnings
from types import ModuleType

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
    """Installs `JIT_FUSER` and drops notices that repeat what is known: no Transformer Engine, no Apex."""
    JIT_FUSER.install()
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    # torch warns of a CUDA toolkit without a GPU when megatron looks for a compiler.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
