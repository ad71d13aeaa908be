"""Writes docs/versions.md from the files that pin: the pyproject.toml files and relax-npu's pins."""

import argparse
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
HEAD = """# Versions

Written by `nox -s docs` from the files that pin; a test compares. A version moves only when the tests pass
on the new one: `nox -s lock` resolves everything afresh.

"""


def read(path: str) -> dict[str, Any]:
    """Parses one TOML file of the repository."""
    return tomllib.loads((ROOT / path).read_text())


def split(requirement: str) -> tuple[str, str]:
    """`numpy>=1.26` -> ("numpy", ">=1.26"); extras and markers are left out."""
    match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)", requirement)
    assert match
    return match.group(1).lower(), match.group(2).strip()


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows]) + "\n"


def stacks(root: dict[str, Any], core: dict[str, Any], npu: dict[str, Any]) -> str:
    """The table of the two device stacks."""
    exact = {name: rule.removeprefix("==") for name, rule in map(split, core["project"]["dependencies"])}
    groups = {
        group: dict(map(split, root["dependency-groups"][group])) for group in ("accelerator", "ascend")
    }
    torch = {group: found["torch"].removeprefix("==") for group, found in groups.items()}
    pythons = [f"3.{minor}" for minor in python_minors(root["project"]["requires-python"])]
    rows = [["Python", ", ".join(pythons), ", ".join(npu["python"])]]
    rows.append(["torch", torch["accelerator"], torch["ascend"]])
    rows.append(["torch-npu", "-", groups["ascend"]["torch-npu"].removeprefix("==")])
    rows.append(["CANN", "-", npu["cann"]])
    rows.append(["host driver (HDK)", "-", ", ".join(npu["driver"])])
    rows.extend([name, exact[name], exact[name]] for name in ("megatron-core", "transformers"))
    return table(["", "CPU and CUDA", "Ascend NPU"], rows)


def python_minors(rule: str) -> range:
    """`>=3.11,<3.13` -> 11, 12."""
    low, high = re.findall(r"3\.(\d+)", rule)
    return range(int(low), int(high))


def direct(root: dict[str, Any], members: dict[str, dict[str, Any]]) -> str:
    """The table of what the packages ask for, the range each admits and the exact version that is tested."""
    tested: dict[str, list[str]] = defaultdict(list)
    for pin in root["tool"]["uv"]["constraint-dependencies"]:
        name, rule = split(pin)
        marker = pin.partition(";")[2].strip().replace("python_full_version", "Python").replace("'", "")
        tested[name].append(rule.removeprefix("==") + (f" ({marker})" if marker else ""))
    asked: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for member, project in members.items():
        for name, rule in map(split, project["project"].get("dependencies", [])):
            if name not in members:
                asked[name][rule or "any"].append(member)
    rows: list[list[str]] = []
    for name in sorted(asked):
        versions = ", ".join(tested[name]) or "see above"
        rows.extend([name, rule, versions, ", ".join(users)] for rule, users in sorted(asked[name].items()))
    return table(["dependency", "admitted", "tested", "asked for by"], rows)


def page() -> str:
    """The whole page."""
    root = read("pyproject.toml")
    paths = sorted((ROOT / "packages").glob("*/pyproject.toml"))
    members = {path.parent.name: read(str(path.relative_to(ROOT))) for path in paths}
    npu = read("packages/relax-npu/src/relax_npu/pins.toml")
    return (
        HEAD
        + stacks(root, members["relax-core"], npu)
        + "\nDependencies of the packages (the oldest admitted ones are tested by `nox -s tests_lowest`):\n\n"
        + direct(root, members)
        + "\nEverything else that is installed with them is pinned in the root `pyproject.toml`.\n"
    )


def main() -> None:
    """Prints the page, or writes it."""
    parser = argparse.ArgumentParser(description="The page docs/versions.md.")
    parser.add_argument("--write", action="store_true", help="write it")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
