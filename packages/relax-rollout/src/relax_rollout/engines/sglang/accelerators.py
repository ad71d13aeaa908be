"""What a device's own package adds to a server: entry point group ``relax_rollout.sglang_devices``."""

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from relax_rollout.engines.sglang.config import SglangConfig

GROUP = "relax_rollout.sglang_devices"
_OWN = ("cpu", "cuda")
_PACKAGES = {"npu": "relax-npu"}


class ServerDevice(Protocol):
    """A device's part.

    Attributes:
        plugins: names in SGLang's group ``sglang.srt.plugins`` that a server must load beside ours.
    """

    plugins: tuple[str, ...]

    def arguments(
        self, model: Mapping[str, Any], *, devices: int, max_requests: int, draft_tokens: int
    ) -> Mapping[str, Any]:
        """Arguments of a server by name (underscores); True is a flag. ``model`` is config.json."""
        ...

    def environment(self, *, devices: int, draft_tokens: int) -> Mapping[str, str]:
        """Environment variables of a server."""
        ...


def find(device: str) -> ServerDevice | None:
    """The part of a device, or None where there is nothing to add.

    Raises:
        ValueError: the package that knows SGLang on this device is not installed.
    """
    name = device.partition(":")[0]
    if name in _OWN:
        return None
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        package = _PACKAGES.get(name, f"the package with the entry point {name} of {GROUP}")
        raise ValueError(f"SGLang's servers on {name} need {package}, which is not installed: install it")
    part: ServerDevice = found[0].load()()
    return part


def arguments(config: SglangConfig) -> list[str]:
    """What the device adds to a server's command line; later arguments go before earlier ones."""
    part = find(config.device)
    if part is None:
        return []
    model = json.loads((Path(config.model) / "config.json").read_text())
    given = part.arguments(
        model,
        devices=config.tensor_parallel,
        max_requests=config.max_rows,
        draft_tokens=config.draft_tokens,
    )
    return [word for name, value in given.items() for word in _words(name, value)]


def environment(config: SglangConfig) -> dict[str, str]:
    """What the device adds to a server's environment, and which of SGLang's plugins it loads."""
    part = find(config.device)
    if part is None:
        return {"SGLANG_PLUGINS": "relax"}
    own = part.environment(devices=config.tensor_parallel, draft_tokens=config.draft_tokens)
    return {**own, "SGLANG_PLUGINS": ",".join(("relax", *part.plugins))}


def _words(name: str, value: Any) -> Iterator[str]:
    if value is False or value is None:
        return
    yield f"--{name.replace('_', '-')}"
    if value is not True:
        yield from map(str, value if isinstance(value, list | tuple) else [value])
