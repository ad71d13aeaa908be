"""A named correction of another project's module at run time, which refuses what it does not know."""

import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)
_applied: dict[str, ModuleType] = {}


class FixMismatchError(RuntimeError):
    """The module to correct is of another version, or looks otherwise, than the correction was made for."""


@dataclass(frozen=True)
class Fix:
    """One correction.

    Attributes:
        name: short and unique.
        distribution: whose version decides.
        versions: those it was made for, each exact.
        module: the module that it changes.
        expects: for each attribute of the module (dotted) the names of its parameters, in order; () for what
            is not called.
        wrong: what goes wrong without it.
        apply: changes the module.
        test: the test that fails without it.
    """

    name: str
    distribution: str
    versions: tuple[str, ...]
    module: str
    expects: Mapping[str, tuple[str, ...]]
    wrong: str
    apply: Callable[[ModuleType], None] = field(repr=False)
    test: str

    def install(self, *, version: str | None = None) -> None:
        """Imports the module and changes it; once per process and module object.

        Args:
            version: of the distribution; looked up when None.

        Raises:
            FixMismatchError: the version or the interface is another one. Nothing was changed.
        """
        found = version or importlib.metadata.version(self.distribution)
        if found not in self.versions:
            raise FixMismatchError(
                f"{self.name} was made for {self.distribution} {', '.join(self.versions)}, found {found}: "
                f"install one of those. Without it: {self.wrong}"
            )
        module = importlib.import_module(self.module)
        if _applied.get(self.name) is module:
            return
        for path, parameters in self.expects.items():
            self._expect(module, path, parameters)
        self.apply(module)
        _applied[self.name] = module
        logger.info("%s: corrected %s (%s)", self.name, self.module, self.wrong)

    def _expect(self, module: ModuleType, path: str, parameters: tuple[str, ...]) -> None:
        try:
            found = attrgetter(path)(module)
        except AttributeError as error:
            raise FixMismatchError(f"{self.name}: {self.module} has no {path}; not corrected") from error
        if not parameters:
            return
        names = tuple(inspect.signature(found).parameters)
        if names[: len(parameters)] != parameters:
            raise FixMismatchError(
                f"{self.name}: {self.module}.{path} takes {names}, expected {parameters}; not corrected"
            )


def replace(module: ModuleType, name: str, new: Any) -> None:
    """Sets `module.name` to `new`, and every other loaded module's name for the same object.

    Those that did `from module import name` would otherwise keep what was there.
    """
    old = getattr(module, name)
    for other in list(sys.modules.values()):
        if isinstance(other, ModuleType) and other.__dict__.get(name) is old:
            setattr(other, name, new)
    setattr(module, name, new)
