"""How weights travel from this process to its servers, where nobody has said so: what works is tried."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from relax_rollout.engine import EngineError
from relax_rollout.engines.sglang.config import SglangConfig, Transport
from relax_rollout.engines.sglang.server import Server
from relax_rollout.engines.sglang.update import together
from relax_rollout.weights.probe import FileProbe, MemoryProbe, Probe

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """What was chosen.

    Args:
        transport: "files", "ipc" or "broadcast".
        why: for the log.
    """

    transport: Transport
    why: str


async def choose(config: SglangConfig, servers: Sequence[Server], device: torch.device) -> Way:
    """The transport that was asked for, or the first one that works.

    Args:
        config: of the engine.
        servers: all must be reached.
        device: where the tensors are.

    Raises:
        EngineError: "local" was asked for, and some server shares neither memory nor files with this process.
    """
    if config.transport not in ("auto", "local"):
        return Way(config.transport, "asked for")
    way = await _first(config, servers, device)
    log.info("weights travel by %s: %s", way.transport, way.why)
    return way


async def _first(config: SglangConfig, servers: Sequence[Server], device: torch.device) -> Way:
    where = config.device.partition(":")[0]
    if device.type == where and await _seen(servers, lambda: MemoryProbe(device)):
        return Way("ipc", f"every server opens memory of {device} where it is")
    if await _seen(servers, lambda: FileProbe(config.folder)):
        return Way("files", f"every server sees files of this host, and not the tensors' memory, of {device}")
    if config.transport == "auto":
        return Way("broadcast", "a server sees neither this host's memory nor its files")
    raise EngineError(
        "weights were to travel through memory of this host, and a server sees none of it: it runs on "
        "another host, or in a container of its own; let weights travel by broadcast, or by files in a "
        "folder that both see"
    )


async def _seen(servers: Sequence[Server], make: Callable[[], Probe]) -> bool:
    try:
        probe = make()
    except ValueError:
        return False
    try:
        answers = await together([server.control("sees", handles=[probe.handle]) for server in servers])
    finally:
        probe.close()
    return all(answer["sees"] for answer in answers)
