"""A Ray of the run's own, begun and ended with it, or one that is joined."""

import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray

from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.errors import ClusterError

_log = logging.getLogger(__name__)

_ATTEMPTS = 4
_PREFIX = "relax-ray-"
_SPARE_BYTES = 128 * 2**20


@contextmanager
def open_ray(config: ClusterConfig, *, cpus: int, weight_bytes: int) -> Iterator[None]:
    """Ray for the `with` block; `set_environment` was called before.

    A Ray of the run's own listens on the loopback alone, at ports that were free; its files go with it.
    Should this process be killed, its Ray ends too.

    Args:
        config: which Ray.
        cpus: how many processes a Ray of the run's own may place.
        weight_bytes: of the model; sizes the shared memory.

    Raises:
        ClusterError: it cannot be joined.
    """
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": f"relax-{secrets.token_hex(6)}",
        "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, sys.path)))}},
    }
    if config.address is None:
        with _folder() as folder:
            options |= {"num_cpus": cpus, "object_store_memory": _store_bytes(config, weight_bytes)}
            _start(folder, options)
            try:
                yield
            finally:
                ray.shutdown()
        return
    try:
        ray.init(address=config.address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"cluster.address is {config.address!r}, and no Ray answers there: {error}. Start one with "
            "`ray start --head`, or set cluster.address to null for a Ray of the run's own"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _start(folder: Path, options: dict[str, Any]) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder),
                **options,
            )
            return
        # Ray has no name of its own for this, and its 30 seconds are too few for a busy machine.
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == _ATTEMPTS:
                raise
            _log.warning("Ray did not start within its 30 seconds; attempt %d of %d", attempt + 1, _ATTEMPTS)
            ray.shutdown()


def _store_bytes(config: ClusterConfig, weight_bytes: int) -> int:
    if config.object_store_gib is not None:
        return int(config.object_store_gib * 2**30)
    return _SPARE_BYTES + 2 * weight_bytes


@contextmanager
def _folder() -> Iterator[Path]:
    """A new folder for Ray's files, its name short enough for sockets; removes those of killed processes."""
    root = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
    for old in root.glob(f"{_PREFIX}*"):
        owner = old.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)) and old.stat().st_uid == os.getuid():
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
