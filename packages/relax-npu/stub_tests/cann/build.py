"""Compiles the stub of CANN that torch_npu loads on a machine without one.

    python packages/relax-npu/stub_tests/cann/build.py FOLDER

writes FOLDER/*.so for the installed torch_npu; LD_LIBRARY_PATH=FOLDER then lets `import torch_npu` succeed.
Names of CANN's that the libraries of the wheel leave undefined are functions that they need; those that they
look up while they run stand among their strings. Nothing of CANN is read or copied: names are the wheel's,
the few bodies from bodies.c.
"""

import argparse
import re
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

BODIES = Path(__file__).with_name("bodies.c")
LIBRARIES = (
    *("libascendcl", "libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel"),
    *("libruntime", "libmsprofiler", "libprofapi", "libascend_hal", "libascend_dump", "libascend_ml"),
)
"""What torch_npu's libraries need or look into; all but the first hold nothing and depend on it."""
_NAME = re.compile(r"(?:acl|Msprof|rt[A-Z]|Hccl[A-Z]|Hcom[A-Z])\w*")
_LOOKED_UP = re.compile(
    rb"(?<=\0)(?:acl(?:rt|op|mdl|sys|prof|tdt|dump)?[A-Z]|Hccl[A-Z]|Hcom[A-Z]|Msprof[A-Z])[A-Za-z0-9]+(?=\0)"
)


@cache
def undefined(library: Path) -> set[str]:
    """The names of CANN's that a shared library needs to be loaded; of any machine's kind."""
    command = ["readelf", "--wide", "--dyn-syms", str(library)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = set()
    for line in listed.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[4] == "GLOBAL" and fields[6] == "UND" and _NAME.fullmatch(fields[7]):
            found.add(fields[7])
    return found


@cache
def looked_up(library: Path) -> set[str]:
    """The names of CANN's that a shared library asks for while it runs."""
    return {name.decode() for name in _LOOKED_UP.findall(library.read_bytes())}


def libraries(torch_npu: Path) -> list[Path]:
    """The shared libraries of an installed (or unpacked) torch_npu that it always loads."""
    return sorted([*(torch_npu / "lib").glob("lib*.so"), *torch_npu.glob("_C*.so")])


def source(torch_npu: Path) -> str:
    """The stub in C: our bodies, and a function that returns 0 for every other name."""
    bodies = BODIES.read_text()
    ours = set(re.findall(r"^(?:const )?\w+ \*?(\w+)\(", bodies, re.MULTILINE))
    names = {name for library in libraries(torch_npu) for name in undefined(library) | looked_up(library)}
    return bodies + "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names - ours))


def build(torch_npu: Path, folder: Path) -> None:
    """Writes the stub's shared libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "stub.c"
    text.write_text(source(torch_npu))
    empty = folder / "empty.c"
    empty.write_text("")
    compiler = shutil.which("cc") or "gcc"
    shared = [compiler, "-shared", "-fPIC", "-w"]
    for place, name in enumerate(LIBRARIES):
        parts = [str(text)] if not place else [str(empty), "-Wl,--no-as-needed", f"-L{folder}", "-lascendcl"]
        library = folder / f"{name}.so"
        subprocess.run([*shared, f"-Wl,-soname,{name}.so", "-o", str(library), *parts], check=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    # Found, not imported: importing is what needs the stub.
    spec = find_spec("torch_npu")
    if spec is None or spec.origin is None:
        parser.error("torch_npu is not installed here")
    build(Path(spec.origin).parent, chosen.folder)


if __name__ == "__main__":
    main()
