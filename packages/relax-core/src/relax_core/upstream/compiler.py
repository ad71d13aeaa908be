"""Keeps torch's compiler, 3 s of a processor and 1000 modules, out of processes that compile nothing."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from relax_core.upstream.correction import Correction, Undo
from relax_core.upstream.hook import on_import

_COMPILER = "torch._dynamo"
_MASKS = "torch._dynamo._trace_wrapped_higher_order_op"
_TORCH = ">=2.9,<2.12"
_TRANSFORMERS = ">=5.12,<5.13"


Function = Callable[..., Any]


def _if_loaded(function: Function, guard: Callable[[Function], Function]) -> Function:
    """`guard(function)`, made and called in place of `function` where the compiler is loaded."""
    guarded: list[Function] = []

    @functools.wraps(function)
    def inner(*arguments: Any, **options: Any) -> Any:
        if _COMPILER not in sys.modules:
            return function(*arguments, **options)
        if not guarded:
            guarded.append(guard(function))
        return guarded[0](*arguments, **options)

    return inner


def _ask_the_compiler_if_loaded(module: ModuleType) -> Undo:
    """Functions that the compiler must leave alone load it to say so; where it is not loaded none is."""
    original: Function = module._disable_dynamo

    def _disable_dynamo(function: Function | None = None, recursive: bool = True) -> Any:
        if function is None:
            return functools.partial(_disable_dynamo, recursive=recursive)
        return _if_loaded(function, lambda it: original(it, recursive))

    module._disable_dynamo = _disable_dynamo  # type: ignore[attr-defined]

    def undo() -> None:
        module._disable_dynamo = original  # type: ignore[attr-defined]

    return undo


def _step_without_graph_breaks(module: ModuleType) -> Undo:
    """An optimizer's step tells the compiler of breaks in its graph; without a compiler there is no graph."""
    original: Function = module._use_grad_for_differentiable

    def _use_grad_for_differentiable(function: Function) -> Function:
        @functools.wraps(function)
        def without(optimizer: Any, *arguments: Any, **options: Any) -> Any:
            with module.torch.set_grad_enabled(optimizer.defaults["differentiable"]):
                return function(optimizer, *arguments, **options)

        return _if_loaded(without, lambda _: original(function))

    module._use_grad_for_differentiable = _use_grad_for_differentiable  # type: ignore[attr-defined]

    def undo() -> None:
        module._use_grad_for_differentiable = original  # type: ignore[attr-defined]

    return undo


class _Masks(ModuleType):
    """Stands for a module of the compiler while transformers imports a class from it."""

    class TransformGetItemToIndex:
        """Becomes torch's own, and with it the compiler is loaded, once a mask asks for it."""

        def __new__(cls) -> Any:
            """An instance of torch's class of this name."""
            return importlib.import_module(_MASKS).TransformGetItemToIndex()


@contextmanager
def _without_the_compiler() -> Iterator[None]:
    if _COMPILER in sys.modules:
        yield
        return
    stand_in = sys.modules[_MASKS] = _Masks(_MASKS)
    try:
        yield
    finally:
        if sys.modules.get(_MASKS) is stand_in:
            del sys.modules[_MASKS]


def _later(name: str) -> Callable[[Function], Function]:
    """`torch._dynamo.<name>`, a mark on a function, made once there is a compiler to see it."""

    def mark(function: Function) -> Function:
        def tell(module: ModuleType) -> None:
            if module.__name__ == _COMPILER:
                getattr(module, name)(function)

        on_import(_COMPILER, tell)
        return function

    return mark


class _Marks(ModuleType):
    """Stands for the compiler while transformers marks functions for it."""

    allow_in_graph = staticmethod(_later("allow_in_graph"))
    assume_constant_result = staticmethod(_later("assume_constant_result"))

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_COMPILER), name)


@contextmanager
def _marked_later() -> Iterator[None]:
    import torch

    if _COMPILER in sys.modules:
        yield
        return
    stand_in, allow, disable = _Marks(_COMPILER), torch.compiler.allow_in_graph, torch.compiler.disable

    def disabled(function: Function | None = None, recursive: bool = True, *, reason: Any = None) -> Any:
        if function is None:
            return functools.partial(disabled, recursive=recursive, reason=reason)
        guard: Any = disable
        return _if_loaded(function, lambda it: guard(it, recursive, reason=reason))

    torch._dynamo = stand_in
    torch.compiler.allow_in_graph = stand_in.allow_in_graph
    torch.compiler.disable = disabled
    try:
        yield
    finally:
        torch.compiler.allow_in_graph, torch.compiler.disable = allow, disable
        # Loaded meanwhile the compiler has taken its place; otherwise torch loads it when it is asked for.
        if vars(torch).get("_dynamo") is stand_in:
            del torch._dynamo


_STEP_TEST = "packages/relax-core/tests/upstream/test_compiler.py::test_an_optimizer_step_loads_no_compiler"

FUNCTIONS = Correction(
    name="no-compiler-in-functions",
    module="torch._compile",
    wrong="Making an optimizer, or the first use of activation recompute, loads torch's compiler, to tell it "
    "to leave the function alone.",
    versions=_TORCH,
    apply=_ask_the_compiler_if_loaded,
    test=_STEP_TEST,
    optional=True,
    distribution="torch",
)

OPTIMIZERS = Correction(
    name="no-compiler-in-optimizers",
    module="torch.optim.optimizer",
    wrong="The first step of an optimizer loads torch's compiler, to tell it of a break in a graph that "
    "nobody makes.",
    versions=_TORCH,
    apply=_step_without_graph_breaks,
    test=_STEP_TEST,
    optional=True,
    distribution="torch",
)

MASKS = Correction(
    name="no-compiler-in-masks",
    module="transformers.masking_utils",
    wrong="Any tokenizer or model of transformers loads torch's compiler for a class that masks of custom "
    "patterns alone use.",
    versions=_TRANSFORMERS,
    apply=lambda module: lambda: None,
    around=_without_the_compiler,
    test="packages/relax-core/tests/upstream/test_compiler.py::test_a_tokenizer_and_a_model_load_no_compiler",
    optional=True,
    distribution="transformers",
)

MODELS = Correction(
    name="no-compiler-in-models",
    module="transformers.modeling_utils",
    wrong="Any model of transformers loads torch's compiler to mark a few functions for it.",
    versions=_TRANSFORMERS,
    apply=lambda module: lambda: None,
    around=_marked_later,
    test="packages/relax-core/tests/upstream/test_compiler.py::test_a_tokenizer_and_a_model_load_no_compiler",
    optional=True,
    distribution="transformers",
)

COMPILERS = (FUNCTIONS, OPTIMIZERS, MASKS, MODELS)
