"""What megatron-core needs on the NPU beyond torch_npu's transfer, when MindSpeed is not there to do it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

PACKAGE = "megatron"
_named = False


@contextmanager
def transferring(torch: ModuleType) -> Iterator[None]:
    """Imports the transfer inside this context; what megatron took from `torch.cuda` earlier follows it.

    A module that was imported before holds the functions of `torch.cuda` itself (`from torch.cuda import
    _lazy_call`). They would go on to call CUDA, or to queue what never happens.
    """
    places = (torch.cuda, torch.cuda.random)
    before = [dict(vars(place)) for place in places]
    yield
    changed: dict[int, tuple[Any, Any]] = {}
    for place, names in zip(places, before, strict=True):
        for name, old in names.items():
            new = getattr(place, name, old)
            if new is not old and isinstance(old, FunctionType | type):
                changed[id(old)] = (old, new)
    for module in _loaded():
        for name, value in list(vars(module).items()):
            if id(value) in changed:
                setattr(module, name, changed[id(value)][1])


def name_types(tensor: type) -> None:
    """Makes megatron read `torch.cuda.FloatTensor` where a tensor of the NPU tells its type; once.

    Its optimizers choose by that string and refuse `torch.npu.FloatTensor`. Other callers read the truth.
    """
    global _named
    if _named:
        return
    _named = True
    usual: Callable[..., Any] = tensor.type  # type: ignore[attr-defined]

    def type_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = usual(self, *args, **kwargs)
        if isinstance(answer, str) and _calls_from_megatron():
            return answer.replace("torch.npu.", "torch.cuda.", 1)
        return answer

    tensor.type = type_of  # type: ignore[attr-defined]


def _calls_from_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0] == PACKAGE


def _loaded() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == PACKAGE and isinstance(module, ModuleType)
    ]
