"""One correction of an upstream fault at run time: what is wrong, where, in which versions, and the cure."""

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

from packaging.specifiers import SpecifierSet

from relax_core.upstream.hook import on_import

logger = logging.getLogger(__name__)

_installed: set[str] = set()


class UnsupportedUpstreamError(ValueError):
    """An upstream package has a version that the corrections were not made for."""


@dataclass(frozen=True)
class Correction:
    """A named change of one upstream module.

    Attributes:
        name: short and unique, for instance "distributed-optimizer-shared-step".
        module: the dotted name of the module it changes.
        wrong: what goes wrong without it, in one or two sentences.
        versions: the upstream versions it is known to be right for, as a specifier (">=0.16.1,<0.17").
        apply: changes the module; runs once, right after the module's import.
        thread: address of the upstream discussion, or None if none is known.
        test: the test that fails without it.
        needed: whether this process needs it (for instance only without Transformer Engine).
        distribution: the distribution that `versions` speaks of.
    """

    name: str
    module: str
    wrong: str
    versions: str
    apply: Callable[[ModuleType], None] = field(repr=False)
    test: str
    thread: str | None = None
    needed: Callable[[], bool] = field(default=lambda: True, repr=False)
    distribution: str = "megatron-core"

    @property
    def installed(self) -> bool:
        """Whether `install` ran for it in this process."""
        return self.name in _installed

    def install(self) -> None:
        """Applies the correction to its module, now or when it is first imported; once per process.

        Raises:
            UnsupportedUpstreamError: the installed version lies outside `versions`.
        """
        if self.installed or not self.needed():
            return
        require_version(self.distribution, self.versions, what=f"correction {self.name!r}")
        _installed.add(self.name)
        target = self.module

        def act(module: ModuleType) -> None:
            if module.__name__ == target:
                self.apply(module)

        on_import(target, act)
        logger.debug("installed %s: %s", self.name, self.wrong)


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
