"""No package reaches into another's private names: what begins with an underscore belongs to its package."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULES = ("relax_bridge", "relax_core", "relax_kernels", "relax_npu", "relax_rollout")


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def reaches(source: str, own: str) -> Iterator[str]:
    """The private names of sibling packages that a module's source uses."""
    siblings = {module for module in MODULES if module != own}
    bound: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        paths: list[str] = []
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
            bound.update(
                alias.asname or alias.name.split(".")[0]
                for alias in node.names
                if alias.name.split(".")[0] in siblings
            )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            if node.module.split(".")[0] in siblings:
                bound.update(alias.asname or alias.name for alias in node.names)
        for path in paths:
            first, *rest = path.split(".")
            if first in siblings and any(is_private(name) for name in rest):
                yield path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = ast.unparse(node)
            if chain.split(".")[0] in bound:
                yield chain


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import relax_bridge._table", ["relax_bridge._table"]),
        ("from relax_bridge.map import _join", ["relax_bridge.map._join"]),
        ("from relax_bridge import map as m\nm._join()", ["m._join"]),
        ("import relax_bridge\nrelax_bridge.map._join()", ["relax_bridge.map._join"]),
        ("from relax_core.x import _mine", []),
        ("from .x import _mine", []),
        ("from relax_bridge import __version__", []),
        ("self._x = 1", []),
    ],
)
def test_the_search_itself(source: str, found: list[str]) -> None:
    assert list(reaches(source, "relax_core")) == found


@pytest.mark.parametrize("module", MODULES)
def test_no_private_name_of_a_sibling(module: str, root: Path) -> None:
    folder = root / "packages" / module.replace("_", "-") / "src"
    found = {
        str(path.relative_to(root)): names
        for path in folder.rglob("*.py")
        if (names := list(reaches(path.read_text(), module)))
    }
    assert not found
