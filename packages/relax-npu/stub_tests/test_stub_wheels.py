"""What the wheels of both kinds of machine ask of CANN: one stub serves both."""

import os
import runpy
import subprocess
from pathlib import Path

import pytest
import torch_npu

BUILD = runpy.run_path(str(Path(__file__).with_name("cann") / "build.py"))
HERE = Path(torch_npu.__file__).parent


@pytest.fixture
def other() -> Path:
    """torch_npu as it is installed on the other kind of machine."""
    return Path(os.environ["RELAX_STUB_OTHER"])


def asked(torch_npu_folder: Path, how: str) -> set[str]:
    libraries = BUILD["libraries"](torch_npu_folder)
    assert {"libtorch_npu.so", "libtensorpipe.so"} <= {library.name for library in libraries}
    return {name for library in libraries for name in BUILD[how](library)}


def test_the_wheels_are_of_two_machines_and_one_commit(other: Path) -> None:
    machines = {
        subprocess.run(
            ["readelf", "-h", folder / "lib" / "libtorch_npu.so"], capture_output=True, text=True, check=True
        )
        .stdout.partition("Machine:")[2]
        .split("\n")[0]
        .strip()
        for folder in (HERE, other)
    }
    assert machines == {"AArch64", "Advanced Micro Devices X86-64"}
    assert (HERE / "version.py").read_text() == (other / "version.py").read_text()


def test_both_need_the_same_functions_to_be_loaded(other: Path) -> None:
    needed = asked(HERE, "undefined")
    assert len(needed) > 70
    assert needed == asked(other, "undefined")


def test_the_stub_holds_what_either_looks_up_while_it_runs(other: Path) -> None:
    """The names that matter: the others are parts of texts that a compiler laid out in another way."""
    told = BUILD["source"](HERE)
    for name in asked(HERE, "looked_up") & asked(other, "looked_up"):
        assert f" {name}(" in told or f"*{name}(" in told, name


def test_the_schemas_are_frozen_alike_from_either(other: Path) -> None:
    texts = [
        {
            line
            for line in (folder / "lib" / "libtorch_npu.so").read_bytes().split(b"\0")
            if line.startswith(b"npu_")
        }
        for folder in (HERE, other)
    ]
    schemas = [{text for text in found if b"(" in text and b") -> " in text} for found in texts]
    assert schemas[0] == schemas[1]
    assert len(schemas[0]) > 200
