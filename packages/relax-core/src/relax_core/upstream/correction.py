"""One correction of an upstream fault at run time: what is wrong, where, in which versions, and the cure."""

import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from relax_core.upstream.hook import around_import, on_import

logger = logging.getLogger(__name__)

Undo = Callable[[], None]


class UnsupportedUpstreamError(ValueError):
    """An upstream package has a version that the corrections were not made for."""


@dataclass(frozen=True)
class Correction:
    """A named change of one upstream module.

    Attributes:
        name: short and unique, for instance "distributed-optimizer-group-order".
        module: the dotted name of the module it changes.
        wrong: what goes wrong without it, in one or two sentences.
        versions: the upstream versions it is known to be right for, as a specifier (">=0.16.1,<0.17").
        apply: changes the module and returns what undoes the change; called right after the module's import.
        test: the test that fails without it.
        thread: address of the upstream discussion, or None if none was found.
        needed: whether this process needs it (for instance only without Transformer Engine).
        distribution: the distribution that `versions` speaks of.
        around: entered while the module's code runs, if it is imported later.
        optional: whether it is left out, instead of refused, where `versions` does not hold.
    """

    name: str
    module: str
    wrong: str
    versions: str
    apply: Callable[[ModuleType], Undo] = field(repr=False)
    test: str
    thread: str | None = None
    needed: Callable[[], bool] = field(default=lambda: True, repr=False)
    distribution: str = "megatron-core"
    around: Callable[[], AbstractContextManager[None]] | None = field(default=None, repr=False)
    optional: bool = False

    @property
    def installed(self) -> bool:
        """Whether `install` ran for it in this process and found it needed."""
        return self.name in _installed

    def install(self) -> None:
        """Applies the correction to its module, now or when it is first imported; once per process.

        Raises:
            UnsupportedUpstreamError: the installed version lies outside `versions`, and it is not optional.
        """
        if self.installed or not self.needed():
            return
        if self.optional and not holds(self.distribution, self.versions):
            return
        require_version(self.distribution, self.versions, what=f"correction {self.name!r}")
        _installed.add(self.name)
        if self.around is not None:
            around_import(self.module, self.around)
        on_import(self.module, self._act)
        logger.debug("installed %s: %s", self.name, self.wrong)

    def _act(self, module: ModuleType) -> None:
        if module.__name__ == self.module:
            _applied[self.name] = (module, self.apply(module))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Undoes the correction inside the context, to show or to measure the fault."""
        module, undo = _applied[self.name]
        undo()
        try:
            yield
        finally:
            _applied[self.name] = (module, self.apply(module))


_installed: set[str] = set()
_applied: dict[str, tuple[ModuleType, Undo]] = {}


def replace_attribute(owner: type, name: str, make: Callable[[Any], Any]) -> Undo:
    """Sets `owner.name` to `make(what it is now)` and returns what puts that back.

    `make` gets the raw attribute: a function, or a classmethod object.
    """
    current = vars(owner)[name]
    setattr(owner, name, make(current))
    return lambda: setattr(owner, name, current)


def holds(distribution: str, versions: str) -> bool:
    """Whether the installed version of a distribution is one of `versions`."""
    return importlib.metadata.version(distribution) in SpecifierSet(versions)


def require_version(distribution: str, versions: str, *, what: str) -> None:
    """Refuses an upstream version that `what` was not made for.

    Raises:
        UnsupportedUpstreamError: naming the installed and the allowed versions.
    """
    found = importlib.metadata.version(distribution)
    if found not in SpecifierSet(versions):
        raise UnsupportedUpstreamError(
            f"{what} was made for {distribution} {versions}, but {distribution} {found} is installed; "
            f"install an allowed version (pip install '{distribution}{versions}')"
        )
