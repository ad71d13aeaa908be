"""Settings of the engine ``sglang``."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Transport = Literal["auto", "local", "files", "ipc", "broadcast"]
ServerDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """Settings of the engine ``sglang``.

    Args:
        model: directory with a Hugging Face checkpoint; the servers' only source of weights until an update.
        urls: of servers that run already (``python -m relax_rollout.engines.sglang.serve``); empty starts
            ``servers`` of them here, which end with the engine.
        servers: number of servers started.
        router: "start" puts sglang-router, which ends with the engine, in front of the servers for requests;
            the URL of one that runs uses that; None shares requests out here. Control calls always go to each
            server.
        router_policy: how a router that is started chooses a server, see its ``--policy``.
        device: "cpu", "cuda" or "npu".
        dtype: of the weights and the arithmetic; "auto" takes the one that config.json names.
        tensor_parallel: devices of one server.
        max_rows: the most completions that one server draws at once.
        max_tokens: the most tokens that one server caches; None lets SGLang choose, on a CPU 65536.
        context: the most tokens of prompt and completion; None takes the model's.
        draft_tokens: tokens drafted per step by the checkpoint's MTP layer; 0 is off.
        min_draft_rate: acceptance rate below which drafting is not worth its time: it is turned off at the
            next update, for good, by starting the servers without it one after the other (of servers given by
            ``urls`` it is only reported). 0 leaves it on.
        draft_window: verifications over which the acceptance rate is taken.
        version: of the weights in ``model``.
        transport: how weights travel: "files" through shared memory of the host (or ``folder``); "ipc" as
            memory that the server opens and does not copy, for a server on the device that the tensors are
            on; "broadcast" by a collective; "local" by "ipc" where every server can open the memory of the
            first bucket, else by "files", and refused where they see neither; "auto" likewise, and by
            "broadcast" in place of a refusal. What was chosen, and why, is logged.
        replay: load by the copies that the model's loader was seen to do, all at once. False calls the loader
            with every tensor at every update: for one that does more than to copy.
        folder: where "files" puts buckets; None is shared memory, a file system that all hosts see works
            across hosts.
        backend: collective of "broadcast": "gloo", "nccl" or "hccl"; None takes the device's.
        host: address of this host for servers elsewhere.
        keep_weights: keep the newest weights (in shared memory) for a server that has to be restarted.
        restarts: how often a server of ours is started again before the engine gives up.
        start_timeout_s: seconds for a server to come up.
        call_timeout_s: seconds for one control call or one bucket.
        hang_timeout_s: seconds after which a server that draws and does not answer counts as hung: it is
            started again, and its requests are drawn again.
        retries: how often a control call is repeated that the network or a gateway lost.
        log_folder: where servers write their logs; None is a folder of temporary files.
        arguments: further arguments of SGLang's server, as on its command line.

    Raises:
        ValueError: a value outside its range.
    """

    model: str | Path
    urls: tuple[str, ...] = ()
    servers: int = 1
    router: str | None = None
    router_policy: str = "round_robin"
    device: str = "cpu"
    dtype: ServerDtype = "auto"
    tensor_parallel: int = 1
    max_rows: int = 256
    max_tokens: int | None = None
    context: int | None = None
    draft_tokens: int = 0
    min_draft_rate: float = 0.2
    draft_window: int = 2000
    version: int = 0
    transport: Transport = "files"
    replay: bool = True
    folder: str | Path | None = None
    backend: str | None = None
    host: str = "127.0.0.1"
    keep_weights: bool = True
    restarts: int = 3
    start_timeout_s: float = 900.0
    call_timeout_s: float = 120.0
    hang_timeout_s: float = 120.0
    retries: int = 4
    log_folder: str | Path | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "urls", tuple(url.rstrip("/") for url in self.urls))
        object.__setattr__(self, "arguments", tuple(self.arguments))
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(
                f"model is {str(self.model)!r}, which is no directory with a config.json; give the directory "
                "of a Hugging Face checkpoint (download it first: the engine fetches nothing)"
            )
        for name, kinds in (("dtype", ServerDtype), ("transport", Transport)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; allowed are {', '.join(get_args(kinds))}"
                )
        if self.router is not None and not self.router.startswith(("http://", "https://")):
            if self.router != "start":
                raise ValueError(
                    f'router is {self.router!r}; give "start", the URL of a router that runs, or None'
                )
        elif self.router is not None:
            object.__setattr__(self, "router", self.router.rstrip("/"))
        if self.device.partition(":")[0] not in ("cpu", "cuda", "npu"):
            raise ValueError(f"device is {self.device!r}; SGLang's servers run on cpu, cuda or npu")
        lows = {
            "servers": 1, "tensor_parallel": 1, "max_rows": 1, "draft_tokens": 0, "version": 0, "restarts": 0,
            "retries": 0, "draft_window": 1,
        }  # fmt: skip
        for name, low in lows.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {low}")
        for name in ("start_timeout_s", "call_timeout_s", "hang_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be seconds above 0")

    @property
    def collective(self) -> str:
        """The backend of "broadcast"."""
        named = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
        return self.backend or named[self.device.partition(":")[0]]
