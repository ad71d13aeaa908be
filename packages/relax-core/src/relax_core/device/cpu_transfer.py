"""Lets megatron-core run on the CPU: in its modules, and only there, `torch.cuda` is answered by the host.

Every module of `megatron.core` gets, in place of its globals `torch`, `torch.cuda` and `torch.distributed`,
a view that differs from the real module in the few names below. The rest of the process (transformers, our
own code) keeps the real torch: `torch.cuda.is_available()` stays False and no factory changes. Only four
methods of `torch.Tensor` are changed for everyone; they look at their caller and behave as usual for all
but megatron.

The parts, by name:
    cuda-calls       device, stream, event, memory, nvtx and generator calls of `torch.cuda`
    factories        `device="cuda"` and `pin_memory=True` of `torch.zeros`, `torch.tensor`, ... mean the host
    tensor-methods   `Tensor.cuda()`, `.pin_memory()`, `.record_stream()` do nothing; `Tensor.type()` names
                     a CUDA type, because the optimizers choose by that string
    jit-fuser        `torch.compile` as a decorator does nothing: no compiler at import or in the first step
    collectives      `barrier` drops `device_ids`; `all_to_all_single` takes split sizes given as tensors
    rng-tracker      the tracked "CUDA" generator is torch's CPU generator

megatron may have been imported before: its loaded modules are changed too, and what `torch.compile` had
wrapped in them is unwrapped.
"""

import logging
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

from relax_core.device import cpu_answers
from relax_core.upstream.correction import require_version
from relax_core.upstream.hook import on_import

logger = logging.getLogger(__name__)

MEGATRON_VERSIONS = "==0.16.1"
_PACKAGE = "megatron.core"
_RANDOM = "megatron.core.tensor_parallel.random"

# id(real object) -> (the real object, kept alive so that its id stays its own; what megatron sees instead)
_replacements: dict[int, tuple[Any, Any]] = {}


def is_installed() -> bool:
    """Whether this process has the transfer."""
    return bool(_replacements)


def install() -> None:
    """Installs the transfer in this process, for loaded and future modules of megatron-core. Idempotent.

    Raises:
        relax_core.upstream.UnsupportedUpstreamError: megatron-core has another version than the transfer
            was made for.
    """
    if is_installed():
        return
    require_version("megatron-core", MEGATRON_VERSIONS, what="the cpu transfer")
    _replacements.update(_views())
    _change_tensor_methods()
    on_import(_RANDOM, _change_random)
    on_import(_PACKAGE, _rebind)
    logger.debug("cpu transfer installed for megatron-core %s", MEGATRON_VERSIONS)


class ModuleView(ModuleType):
    """A module that shows another one, with some names replaced."""

    def __init__(self, real: ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(replaced)
        self.__dict__["_relax_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_relax_real"], name)


def _views() -> dict[int, tuple[Any, Any]]:
    """What megatron's globals are replaced by, keyed by the identity of the real object."""
    cuda = ModuleView(torch.cuda, cpu_answers.cuda_names())
    distributed = ModuleView(torch.distributed, cpu_answers.distributed_names())
    view = ModuleView(
        torch,
        {
            "cuda": cuda,
            "distributed": distributed,
            "compile": cpu_answers.compile_nothing,
            "autocast": cpu_answers.autocast,
            **cpu_answers.factories(),
        },
    )
    pairs: list[tuple[Any, Any]] = [(torch, view), (torch.cuda, cuda), (torch.distributed, distributed)]
    for real, shown in [(torch.cuda, cuda), (torch.distributed, distributed), (torch, view)]:
        for name, answer in vars(shown).items():
            original = getattr(real, name, None)
            if isinstance(answer, FunctionType) and isinstance(original, FunctionType):
                pairs.append((original, answer))
    return {id(real): (real, shown) for real, shown in pairs}


def _rebind(module: ModuleType) -> None:
    """Puts the views into the globals of one megatron module and unwraps what `torch.compile` wrapped."""
    for name, value in list(vars(module).items()):
        if id(value) in _replacements:
            setattr(module, name, _replacements[id(value)][1])
        elif isinstance(value, FunctionType):
            setattr(module, name, _uncompiled(value))
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for key, member in list(vars(value).items()):
                if isinstance(member, FunctionType) and _uncompiled(member) is not member:
                    setattr(value, key, _uncompiled(member))


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, "_torchdynamo_orig_callable", function)


def _change_random(module: ModuleType) -> None:
    """Part rng-tracker: the state that megatron saves, forks and restores is the CPU generator's."""
    if module.__name__ != _RANDOM:
        return
    for name, answer in cpu_answers.rng_names().items():
        real = getattr(module, name)
        _replacements[id(real)] = (real, answer)
        setattr(module, name, answer)
    module.CudaRNGStatesTracker.fork = cpu_answers.fork_tracked_rng


def _change_tensor_methods() -> None:
    """Part tensor-methods: four methods that behave otherwise when megatron calls them."""
    for name, answer in cpu_answers.tensor_methods().items():
        setattr(torch.Tensor, name, _for_megatron(getattr(torch.Tensor, name), answer))


def _for_megatron(usual: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith(_PACKAGE):
            return answer(usual, self, *args, **kwargs)
        return usual(self, *args, **kwargs)

    method.__name__ = getattr(usual, "__name__", "method")
    method.__doc__ = usual.__doc__
    return method
