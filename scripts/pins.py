"""The exact versions of everything: resolves the workspace and keeps the result in the root pyproject.toml.

uv's own lock file records the addresses of the index, which differ from site to site, so it is not committed;
the versions in it are, as `constraint-dependencies`. Three rules make a constraint list equal to the lock:

* a package with one version is pinned to it;
* a package that differs between Pythons is pinned once for each, with the marker;
* the packages in which the two device stacks differ (torch and what torch itself pins exactly) are left out,
  for the groups `accelerator` and `ascend` already decide them.
"""

import argparse
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "# Exact versions, written by `nox -s lock`; change nothing by hand.\nconstraint-dependencies = [\n"
END = "]\n# End of the exact versions.\n"
# Decided by the group in use: torch by the group's own ==, the others by == in that torch's metadata.
BY_DEVICE_STACK = re.compile(r"torch|torch-npu|triton|nvidia-.+|cuda-.+")
PYTHON_MARKER = re.compile(r"python_full_version (<|>=) '3\.\d+'")


class Unresolvable(RuntimeError):
    """`uv lock` failed; the message is its own."""


def with_block(pyproject: str, pins: list[str]) -> str:
    """Replaces the pins of a pyproject's text; with an empty list the block stays, empty."""
    before, rest = pyproject.split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + "".join(f'    "{pin}",\n' for pin in pins) + END + after


def copy_of_workspace(target: Path, *, pyproject: str) -> None:
    """Copies what a resolution reads, and nothing else: the root's pyproject (as given) and each member's."""
    (target / "pyproject.toml").write_text(pyproject)
    for member in (ROOT / "packages").glob("*/pyproject.toml"):
        folder = target / "packages" / member.parent.name
        folder.mkdir(parents=True)
        shutil.copy(member, folder)


def resolve(pyproject: str) -> dict[str, Any]:
    """Resolves a temporary copy of the workspace.

    Args:
        pyproject: the text of the root pyproject.toml to resolve with.

    Returns:
        The parsed lock file.

    Raises:
        Unresolvable: no solution, or the index does not answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy_of_workspace(Path(folder), pyproject=pyproject)
        done = subprocess.run(["uv", "lock"], check=False, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise Unresolvable(done.stderr)
        return tomllib.loads((Path(folder) / "uv.lock").read_text())


def versions(lock: Mapping[str, Any]) -> dict[str, dict[str, set[str]]]:
    """For each package of a lock, its versions and the Python markers under which each is taken.

    Workspace members are left out. A version taken under every Python has the one marker "".
    """
    pythons = {marker for text in lock.get("resolution-markers", ()) for marker in python_markers(text)}
    found: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for package in lock["package"]:
        if "registry" not in package["source"]:
            continue
        texts = package.get("resolution-markers", ())
        markers = {marker for text in texts for marker in python_markers(text)}
        everywhere = not markers or markers == pythons
        found[package["name"]][package["version"]] = {""} if everywhere else markers
    return dict(found)


def python_markers(text: str) -> list[str]:
    """The comparisons of the Python version in a marker, for instance `python_full_version < '3.12'`."""
    return [match.group(0) for match in PYTHON_MARKER.finditer(text)]


def as_pins(found: Mapping[str, Mapping[str, set[str]]]) -> list[str]:
    """The constraint list for `versions`' result, in order of name.

    Where the device stacks differ in a package that torch does not pin exactly (setuptools), the older
    version serves both: the newer one comes from the stack that sets no upper bound.
    """
    pins = []
    for name in sorted(found):
        if BY_DEVICE_STACK.fullmatch(name):
            continue
        oldest_first = sorted(found[name], key=lambda version: [int(n) for n in re.findall(r"\d+", version)])
        taken: dict[str, str] = {}
        for version in oldest_first:
            for marker in found[name][version]:
                taken.setdefault(marker, version)
        if "" in taken:
            pins.append(f"{name}=={taken['']}")
        else:
            pins.extend(f"{name}=={version} ; {marker}" for marker, version in sorted(taken.items()))
    return pins


def pins_in(pyproject: str) -> list[str]:
    """The pins that a pyproject's text holds."""
    return list(tomllib.loads(pyproject)["tool"]["uv"]["constraint-dependencies"])


def main() -> None:
    """Prints the pins of a fresh resolution, or writes them."""
    parser = argparse.ArgumentParser(description="The exact versions that a fresh resolution gives.")
    parser.add_argument("--write", action="store_true", help="write them into the root pyproject.toml")
    path = ROOT / "pyproject.toml"
    text = path.read_text()
    if not parser.parse_args().write:
        print("\n".join(as_pins(versions(resolve(with_block(text, []))))))
        return
    written = with_block(text, as_pins(versions(resolve(with_block(text, [])))))
    resolve(written)  # raises when the pins contradict one another
    path.write_text(written)


if __name__ == "__main__":
    main()
