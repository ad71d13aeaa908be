"""A Ray of the run's own, begun and ended with it, or one that is joined."""

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from relax_core.cluster.bare_node import bare_node
from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.errors import ClusterError
from relax_core.cluster.folders import own_folder

_log = logging.getLogger(__name__)

_PREFIX = "relax-ray-"
_ANSWER_S = 20.0
_LOOPBACK = "127.0.0.1"
_PATIENCE_S = 300.0
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
        ClusterError: it cannot be joined, or does not start.
    """
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": f"relax-{secrets.token_hex(6)}",
    }
    path = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
    if config.address is None:
        with own_folder(_PREFIX) as folder, _environment(PYTHONPATH=path):
            try:
                with signals_kept():
                    _start(folder, options, cpus, _store_bytes(config, weight_bytes))
                yield
            finally:
                ray.shutdown()
                _end_children(folder)
        return
    try:
        _require_listener(config.address)
        # In a job of Ray what the job has shipped stays; a PYTHONPATH that it set is in this process's own.
        with signals_kept(), _environment(RAY_OVERRIDE_JOB_RUNTIME_ENV="1"):
            ray.init(address=config.address, runtime_env={"env_vars": {"PYTHONPATH": path}}, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"cluster.address is {config.address!r}, and no Ray answers there: {error}. Start one with "
            "`ray start --head`, or set cluster.address to null for a Ray of the run's own"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Asks `host:port` itself: Ray would wait for an hour and a half under the limits set for busy machines.

    Raises:
        OSError: nobody listens there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


def _start(folder: Path, options: dict[str, Any], cpus: int, store_bytes: int) -> None:
    """Tries until the patience is over: Ray gives itself 30 seconds, too few for a busy machine."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        port = _free_port()
        try:
            with _environment(RAY_GCS_SERVER_PORT=str(port)), bare_node():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    num_cpus=cpus,
                    object_store_memory=store_bytes,
                    _node_ip_address=_LOOPBACK,
                    _temp_dir=str(folder),
                    **options,
                )
            return
        # Ray has no name of its own for this.
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            reason = error
        _log.warning("Ray did not start within its 30 seconds")
        if _joined_late(folder, port, options, deadline):
            return
        _end_children(folder)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"Ray did not start within {_PATIENCE_S:g} seconds: {reason}. The machine is overloaded; run "
                "less on it, or join a Ray that runs already by cluster.address"
            ) from reason


def _joined_late(folder: Path, port: int, options: dict[str, Any], deadline: float) -> bool:
    """Whether what was started came up after all; its raylet ends itself where its helpers are too slow."""
    while _runs(folder, "raylet") and time.monotonic() < deadline:
        if _joined(f"{_LOOPBACK}:{port}", options, deadline):
            return True
        time.sleep(1)
    return False


def _joined(address: str, options: dict[str, Any], deadline: float) -> bool:
    """Whether Ray could be joined until then; where its server is silent `ray.init` asks for hours."""
    outcome: list[BaseException | None] = []

    def join() -> None:
        try:
            ray.init(address=address, _node_ip_address=_LOOPBACK, **options)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=join, name="relax-join", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if outcome and outcome[0] is not None and not isinstance(outcome[0], ConnectionError | RuntimeError):
        raise outcome[0]
    return bool(outcome) and outcome[0] is None


def _runs(folder: Path, name: str) -> bool:
    return any(process.name() == name for process in _children(folder))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((_LOOPBACK, 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Sets variables for this process and those it starts; puts back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it is initialised; the run's own handlers come back."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_children(folder: Path) -> None:
    """Ends what Ray has left running of this process's own: a Ray that started late is not ended by it."""
    for process in _children(folder):
        with suppress(psutil.Error):
            process.kill()


def _children(folder: Path) -> Iterator[psutil.Process]:
    """Processes below this one that serve the Ray of a folder."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(str(folder) in part for part in process.cmdline()):
                yield process


def _store_bytes(config: ClusterConfig, weight_bytes: int) -> int:
    if config.object_store_gib is not None:
        return int(config.object_store_gib * 2**30)
    return _SPARE_BYTES + 2 * weight_bytes
