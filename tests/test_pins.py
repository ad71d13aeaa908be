"""The exact pins agree with a fresh resolution, and what repeats a version agrees with them."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Script = Callable[[str], ModuleType]
OFFLINE = re.compile(
    r"error sending request|failed to (fetch|lookup)|dns error|connection refused|timed out", re.I
)


@pytest.fixture(scope="module")
def pins(script: Script) -> ModuleType:
    return script("pins")


@pytest.fixture(scope="module")
def fresh(pins: ModuleType, root: Path) -> dict[str, Any]:
    """A resolution of the workspace as it stands, in a temporary copy."""
    try:
        return pins.resolve((root / "pyproject.toml").read_text())
    except pins.Unresolvable as error:
        if OFFLINE.search(str(error)):
            pytest.skip(f"the package index does not answer: {str(error).strip().splitlines()[-1]}")
        raise


def test_every_package_of_a_fresh_resolution_is_pinned_to_its_version(
    pins: ModuleType, fresh: dict[str, Any], root: Path
) -> None:
    written = pins.pins_in((root / "pyproject.toml").read_text())
    assert pins.as_pins(pins.versions(fresh)) == written, "run `nox -s lock`"


def test_a_fresh_resolution_has_the_versions_of_both_device_stacks(
    pins: ModuleType, fresh: dict[str, Any]
) -> None:
    found = {name: set(versions) for name, versions in pins.versions(fresh).items()}
    assert found["torch"] == {"2.11.0", "2.9.0"}
    assert found["torch-npu"] == {"2.9.0.post4"}
    assert found["megatron-core"] == {"0.16.1"}
    assert found["transformers"] == {"5.12.1"}


def test_only_what_torch_decides_is_left_without_a_pin(pins: ModuleType, fresh: dict[str, Any]) -> None:
    several = {
        name
        for name, versions in pins.versions(fresh).items()
        if len(versions) > 1 and {""} in versions.values()
    }
    assert several == {"torch", "triton"}


def test_pins_of_a_made_up_lock(pins: ModuleType) -> None:
    old, new = "python_full_version < '3.12'", "python_full_version >= '3.12'"

    def package(name: str, version: str, *markers: str) -> dict[str, Any]:
        return {
            "name": name,
            "version": version,
            "source": {"registry": "x"},
            "resolution-markers": list(markers),
        }

    stack = "extra == 'group-5-relax-ascend'"
    lock = {
        "resolution-markers": [old, new],
        "package": [
            package("one", "1.0"),
            package("two", "2.4", old),
            package("two", "2.10", new),
            package("torch", "2.9.0", f"{old} and {stack}", f"{new} and {stack}"),
            package("split", "9.1", old, new),
            package("split", "10.0", f"{old} and {stack}", f"{new} and {stack}"),
            {"name": "member", "version": "0.1.0", "source": {"editable": "packages/member"}},
        ],
    }
    assert pins.as_pins(pins.versions(lock)) == [
        "one==1.0",
        "split==9.1",
        f"two==2.4 ; {old}",
        f"two==2.10 ; {new}",
    ]


def test_the_block_is_replaced_and_the_rest_kept(pins: ModuleType) -> None:
    text = "a = 1\n" + pins.BEGIN + '    "old==1",\n' + pins.END + "b = 2\n"
    assert (
        pins.with_block(text, ["new==2"]) == "a = 1\n" + pins.BEGIN + '    "new==2",\n' + pins.END + "b = 2\n"
    )


def test_the_page_of_versions_is_current(script: Script) -> None:
    versions = script("versions")
    assert versions.PAGE.read_text() == versions.page(), "run `nox -s docs`"


def test_the_ascend_group_is_the_stack_that_relax_npu_is_built_for(root: Path) -> None:
    group = tomllib.loads((root / "pyproject.toml").read_text())["dependency-groups"]["ascend"]
    npu = tomllib.loads((root / "packages/relax-npu/src/relax_npu/pins.toml").read_text())
    assert sorted(group) == [f"torch-npu=={npu['torch-npu']}", f"torch=={npu['torch']}"]
