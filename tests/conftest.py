"""What the repository's own tests share: the tracked files and the scripts as modules."""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    """The files that git tracks and that exist, as paths relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """Loads scripts/NAME.py as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"relax_script_{name}", ROOT / "scripts" / f"{name}.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
