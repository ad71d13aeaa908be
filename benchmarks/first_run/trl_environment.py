"""TRL's own environment: made once by uv from the exact versions in `trl.txt`, outside of this repository."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("trl.txt")


def default_cache() -> Path:
    """Where environments of benchmarks are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax-benchmarks"


def trl_python(cache: Path) -> Path:
    """The interpreter of the environment, which is made if this version of `trl.txt` has none yet."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    place = cache.resolve() / f"trl-{digest}"
    python, complete = place / "bin" / "python", place / "complete"
    if complete.exists():
        return python
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run(["uv", "venv", "--quiet", "--python", "3.11", str(place)], check=True)
    install = ["uv", "pip", "install", "--quiet", "--python", str(python), "-r", str(REQUIREMENTS)]
    # Elsewhere than here, where uv would apply this workspace's own constraints.
    subprocess.run(install, check=True, cwd=place)
    complete.touch()
    return python
