"""Writes the frozen operator schemas of packages/relax-npu/src/relax_npu/schemas.

torch_npu registers its operators from strings that stand in its libraries, so that its wheels can be read
without CANN, without torch and on any machine; fla_npu's are in a file of its sources:

    pip download --no-deps --only-binary=:all: --python-version 3.11 --platform manylinux_2_28_x86_64 \
        -d wheels torch-npu==2.9.0.post4
    python scripts/npu_schemas.py torch-npu wheels/torch_npu-2.9.0.post4-*.whl
    git clone https://github.com/flashserve/flash-linear-attention-npu
    python scripts/npu_schemas.py fla-npu flash-linear-attention-npu v26.6.0 39bbde7c

Only what relax-npu calls is kept as a schema; of the rest the names are kept.
"""

import argparse
import json
import re
import subprocess
import zipfile
from pathlib import Path

from relax_npu.schema import call_sites

FOLDER = Path(__file__).resolve().parent.parent / "packages/relax-npu/src/relax_npu/schemas"
LIBRARY = "torch_npu/lib/libtorch_npu.so"
TEXT = re.compile(rb"[\x20-\x7e]{8,}")
SCHEMA = re.compile(r"(npu_\w+(?:\.\w+)?)\([^)]*\b(?:Tensor|int|float)\b.*\) -> .+")


def from_wheel(wheel: Path) -> tuple[str, str, dict[str, str]]:
    """Version, commit and schemas of a torch_npu wheel."""
    with zipfile.ZipFile(wheel) as opened:
        version = opened.read("torch_npu/version.py").decode()
        library = opened.read(LIBRARY)
    found = dict(re.findall(r"(\w+)\s*=\s*'([^']+)'", version))
    schemas = {}
    for text in TEXT.findall(library):
        match = SCHEMA.fullmatch(text.decode())
        if match:
            schemas[match.group(1)] = match.group(0)
    return found["__version__"], found["git_version"], schemas


def from_sources(repository: Path, commit: str) -> tuple[str, dict[str, str]]:
    """Full commit id and schemas of fla_npu's sources."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    listed = git("show", f"{commit}:torch_custom/fla_npu/npu_custom.yaml")
    texts = re.findall(r"^\s*- func: (.+)$", listed, re.MULTILINE)
    return git("rev-parse", f"{commit}^{{commit}}").strip(), {text.partition("(")[0]: text for text in texts}


def write(package: str, release: str, commit: str, schemas: dict[str, str]) -> Path:
    """Writes one snapshot and returns its path."""
    called = {site.operator for site in call_sites()}
    kept = {name: schemas[name] for name in sorted(called & set(schemas))}
    data = {
        "package": package,
        "release": release,
        "commit": commit,
        "names": sorted(schemas),
        "schemas": kept,
    }
    path = FOLDER / f"{package}-{release}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    wheels = commands.add_parser("torch-npu")
    wheels.add_argument("wheels", nargs="+", type=Path)
    sources = commands.add_parser("fla-npu")
    sources.add_argument("repository", type=Path)
    sources.add_argument("release")
    sources.add_argument("commit")
    chosen = parser.parse_args()
    if chosen.command == "torch-npu":
        for wheel in chosen.wheels:
            print(write("torch_npu", *from_wheel(wheel)))
    else:
        print(write("fla_npu", chosen.release, *from_sources(chosen.repository, chosen.commit)))


if __name__ == "__main__":
    main()
