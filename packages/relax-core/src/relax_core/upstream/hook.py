"""Runs functions on the modules of a package: on those loaded now, and on each later one on its import."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

Action = Callable[[ModuleType], None]

_actions: dict[str, list[Action]] = {}
_around: dict[str, list[Callable[[], AbstractContextManager[None]]]] = {}


def on_import(package: str, action: Action) -> None:
    """Calls `action(module)` for `package` and every module below it.

    Modules that are loaded already are visited at once; a later one right after its code ran and before its
    importer sees it, so that `from module import name` already gives what `action` left there.

    Args:
        package: a dotted name, "megatron.core" or "megatron.core.optimizer.distrib_optimizer".
        action: called once per module; what it raises surfaces from the import statement.
    """
    _watch()
    _actions.setdefault(package, []).append(action)
    for name, module in list(sys.modules.items()):
        if _covers(package, name) and isinstance(module, ModuleType):
            action(module)


def around_import(module: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Enters `context()` while the code of a module runs that is yet to be imported.

    Args:
        module: its dotted name.
        context: makes what is entered.
    """
    _watch()
    _around.setdefault(module, []).append(context)


def _watch() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _covers(package: str, name: str) -> bool:
    return name == package or name.startswith(package + ".")


def _actions_for(name: str) -> list[Action]:
    return [action for package, actions in _actions.items() if _covers(package, name) for action in actions]


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with ExitStack() as stack:
            for context in _around.get(module.__name__, ()):
                stack.enter_context(context())
            super().exec_module(module)
        for action in _actions_for(module.__name__):
            action(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _around and not any(_covers(package, fullname) for package in _actions):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
