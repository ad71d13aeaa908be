"""Operator schemas: the frozen ones of each supported release, and the calls that this package makes of them.

Reads text only and needs neither torch nor torch_npu. The snapshots under schemas/ are written by
scripts/npu_schemas.py from torch_npu's wheels and from fla_npu's sources.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

FOLDER = "schemas"


class SchemaMismatchError(ValueError):
    """A call does not fit an operator's schema."""


@dataclass(frozen=True)
class Argument:
    """One argument of an operator.

    Attributes:
        kind: its type as the schema writes it: `Tensor`, `Tensor?`, `int[]?`, ...
        keyword_only: whether it cannot be given by place.
        required: whether it has no default.
    """

    name: str
    kind: str
    keyword_only: bool
    required: bool


@dataclass(frozen=True)
class Schema:
    """An operator's name and arguments, parsed from `name(Tensor x, *, int n=1) -> Tensor`."""

    name: str
    arguments: tuple[Argument, ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> "Schema":
        """Reads one schema; its result is left unread."""
        name, _, rest = text.partition("(")
        inner = rest[: _closing(rest)]
        keyword_only, arguments = False, []
        for part in _split(inner):
            if part == "*":
                keyword_only = True
                continue
            declared, equals, _ = part.partition("=")
            kind, _, argument = declared.strip().rpartition(" ")
            arguments.append(Argument(argument, kind.strip(), keyword_only, not equals))
        return cls(name, tuple(arguments), text)

    def check(self, places: int, names: frozenset[str]) -> None:
        """Requires that a call with so many arguments by place and these by name fits.

        Raises:
            SchemaMismatchError: saying which argument does not fit.
        """
        by_place = [argument for argument in self.arguments if not argument.keyword_only]
        if places > len(by_place):
            raise SchemaMismatchError(f"{self.name} takes {len(by_place)} arguments by place, given {places}")
        given = {argument.name for argument in by_place[:places]}
        known = {argument.name for argument in self.arguments}
        for name in sorted(names):
            if name not in known:
                raise SchemaMismatchError(f"{self.name} has no argument {name!r}: {self.text}")
            if name in given:
                raise SchemaMismatchError(f"{self.name} gets {name!r} by place and by name")
        missing = [a.name for a in self.arguments if a.required and a.name not in given | names]
        if missing:
            raise SchemaMismatchError(f"{self.name} needs {', '.join(missing)}")


def _closing(text: str) -> int:
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    raise ValueError(f"unbalanced: {text}")


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


@dataclass(frozen=True)
class Snapshot:
    """The operators of one release.

    Attributes:
        package: `torch_npu` or `fla_npu`.
        release: version or tag.
        commit: of the sources that it was built from.
        names: every operator that it registers.
        schemas: those that relax-npu calls, by name.
    """

    package: str
    release: str
    commit: str
    names: frozenset[str]
    schemas: dict[str, Schema]


@cache
def snapshots() -> tuple[Snapshot, ...]:
    """Every frozen release, oldest first within a package."""
    found = []
    for path in sorted((files("relax_npu") / FOLDER).iterdir(), key=lambda path: path.name):
        if not path.name.endswith(".json"):
            continue
        data = json.loads(path.read_text())
        schemas = {name: Schema.parse(text) for name, text in data["schemas"].items()}
        found.append(
            Snapshot(data["package"], data["release"], data["commit"], frozenset(data["names"]), schemas)
        )
    return tuple(found)


def snapshot(package: str, release: str) -> Snapshot:
    """The snapshot of one release.

    Raises:
        ValueError: naming the releases there are.
    """
    for one in snapshots():
        if (one.package, one.release) == (package, release):
            return one
    known = ", ".join(one.release for one in snapshots() if one.package == package)
    raise ValueError(f"no snapshot of {package} {release}; there are: {known}")


@dataclass(frozen=True)
class CallSite:
    """A call `torch.ops.npu.<operator>(...)` in this package's source.

    Attributes:
        spread: whether a `**mapping` is among the arguments, whose names the source does not show.
    """

    operator: str
    file: str
    line: int
    places: int
    names: frozenset[str]
    spread: bool


def call_sites() -> tuple[CallSite, ...]:
    """Every call of an NPU operator in this package."""
    root = Path(__file__).parent
    found = [
        site
        for path in sorted(root.rglob("*.py"))
        for site in calls_in(path.read_text(), str(path.relative_to(root)))
    ]
    return tuple(found)


def calls_in(source: str, file: str) -> Iterator[CallSite]:
    """The calls in one module's source."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) != "torch.ops.npu":
            continue
        names = frozenset(keyword.arg for keyword in node.keywords if keyword.arg is not None)
        spread = any(keyword.arg is None for keyword in node.keywords)
        yield CallSite(node.func.attr, file, node.lineno, len(node.args), names, spread)
