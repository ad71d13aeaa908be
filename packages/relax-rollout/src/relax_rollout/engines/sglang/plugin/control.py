"""Control calls inside SGLang's scheduler process.

They travel in SGLang's own ``/weights_checker`` call: its ``action`` carries our message as JSON behind
``relax:``, its ``message`` the answer. Every answer has the server's ``boot``, a name drawn when the process
started: a server that was restarted in between is told by it.
"""

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from relax_rollout.engines.sglang.plugin import TEXT_ONLY, faults, memory, versions
from relax_rollout.weights.broadcast import BroadcastGroup, BroadcastSource, Meeting
from relax_rollout.weights.bucket import Bucket, wrong_names
from relax_rollout.weights.files import FileSource
from relax_rollout.weights.ipc import IpcReceiver
from relax_rollout.weights.probe import sees
from relax_rollout.weights.receiver import Receiver

log = logging.getLogger(__name__)

PREFIX = "relax:"
BOOT = secrets.token_hex(8)


def around_check_weights(original: Any, updater: Any, request: Any) -> Any:
    """Answer our messages; others go to SGLang."""
    if not request.action.startswith(PREFIX):
        return original(updater, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    try:
        message = json.loads(request.action.removeprefix(PREFIX))
        answer = control_of(updater).handle(message)
    except Exception as error:  # an answer to the client, which raises it there
        log.exception("control call failed")
        answer = {"error": str(error), "kind": type(error).__name__}
    # Every rank takes part, also one that failed: the others would wait for it.
    merged = _merged(answer, updater)
    return CheckWeightsReqOutput(success="error" not in merged, message=json.dumps(merged))


def _merged(answer: Mapping[str, Any], updater: Any) -> dict[str, Any]:
    """Answers of all tensor-parallel ranks in one: what one of them finds wrong is wrong."""
    merged = dict(answer) | {"boot": BOOT}
    size = torch.distributed.get_world_size(group=updater.tp_cpu_group)
    if size == 1:
        return merged
    everyone: list[Any] = [None] * size
    torch.distributed.all_gather_object(everyone, merged, group=updater.tp_cpu_group)
    merged["boot"] = "+".join(one["boot"] for one in everyone)
    failed = next((one for one in everyone if "error" in one), None)
    if failed is not None:
        return {"boot": merged["boot"], "error": failed["error"], "kind": failed["kind"]}
    for other in everyone:
        for key, value in other.items():
            if key == "digests":
                wrong = {n: d for n, d in value.items() if d != other["expected"].get(n)}
                merged[key] = merged[key] | wrong
            elif key in ("stale", "damaged"):
                merged[key] = sorted({*merged[key], *value})
            elif key == "sees":
                merged[key] = merged[key] and value
    return merged


def _mine(parts: Sequence[Any], rank: int) -> Any:
    """What is for this rank: one part is for all, several are for one each."""
    return parts[rank] if len(parts) > 1 else parts[0]


class Control:
    """The calls, each a method of the message's ``call``."""

    def __init__(self, updater: Any) -> None:
        self._updater = updater
        self._runner = updater.tp_worker.model_runner
        self._group: BroadcastGroup | None = None
        self._joined = ""
        self._opened = IpcReceiver()
        faults.plant(self._models())
        self.receiver = Receiver(
            self._models(),
            _checkpoint(Path(self._runner.model_config.model_path)),
            torch.device(self._runner.device),
        )

    def _models(self) -> dict[str, torch.nn.Module]:
        from sglang.srt.managers.scheduler_components.weight_updater import _get_draft_model_runner

        models = {"target": self._runner.model}
        draft = _get_draft_model_runner(self._updater.draft_worker)
        if draft is not None:
            models["draft"] = draft.model
        return models

    def handle(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one message."""
        calls: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "describe": self._describe,
            "status": self._status,
            "begin": self._begin,
            "connect": self._connect,
            "sees": self._sees,
            "receive": self._receive,
            "commit": self._commit,
            "discard": self._discard,
        }
        return calls[message["call"]](message)

    def _describe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        models = self._models()
        counted = {id(p): p.numel() for model in models.values() for p in model.parameters()}
        return self._status(message) | {
            "pid": os.getpid(),
            "manifest": self.receiver.manifest(),
            "dtype": str(self._runner.dtype).removeprefix("torch."),
            "device": str(self._runner.device),
            "parameters": sum(counted.values()),
            "context": self._runner.model_config.context_len,
            "vocabulary": self._runner.model_config.vocab_size,
            "patch": self._patch(),
        }

    def _patch(self) -> list[int] | None:
        """Numbers of a picture's patch, and patches along one side of a token; None without a tower."""
        vision = getattr(self._runner.model_config.hf_config, "vision_config", None)
        if vision is None or os.environ.get(TEXT_ONLY) == "1":
            return None
        numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return [numbers, vision.spatial_merge_size]

    def _status(self, message: Mapping[str, Any]) -> dict[str, Any]:
        scheduler = self._updater.scheduler
        return {
            "version": self.receiver.version,
            "paused": scheduler._engine_paused,
            "released": bool(self._updater.offload_tags),
            "running": len(running(scheduler)),
            "waiting": len(scheduler.waiting_queue),
            "updating": None if self.receiver.staged is None else self.receiver.staged.version,
        }

    def _begin(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.receiver.begin(message["update"], message["version"])
        return {}

    @property
    def _rank(self) -> int:
        """Among the processes of this server."""
        return torch.distributed.get_rank(group=self._updater.tp_cpu_group)

    def _connect(self, message: Mapping[str, Any]) -> dict[str, Any]:
        meeting = Meeting(**message["meeting"])
        # Asked again because the answer was lost, it is there already.
        if self._joined != meeting.name:
            self._group = meeting.join(message["first_rank"] + self._rank)
            self._joined = meeting.name
        return {}

    def _sees(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"sees": sees(_mine(message["handles"], self._rank), torch.device(self._runner.device))}

    def _receive(self, message: Mapping[str, Any]) -> dict[str, Any]:
        bucket = Bucket.from_json(_mine(message["parts"], self._rank))
        if bucket.file is not None:
            source: Any = FileSource(bucket.file)
        elif bucket.handle is not None:
            source = self._opened.source(bucket.handle)
        elif self._group is None:
            raise ValueError("a broadcast was announced, but no group was connected")
        else:
            source = BroadcastSource(self._group)
        received = self.receiver.receive(message["update"], message["bucket"], bucket, source)
        return {"damaged": wrong_names(bucket.entries, received)}

    def _commit(self, message: Mapping[str, Any]) -> dict[str, Any]:
        scheduler = self._updater.scheduler
        if not scheduler._engine_paused:
            raise RuntimeError("the server is not paused; weights change only between two tokens")
        if running(scheduler):
            raise RuntimeError("requests hold caches of the old weights; pause with the mode retract")
        for request in scheduler.waiting_queue:
            versions.stamp(request)
        self.receiver.replay = message.get("replay", True)
        result = self.receiver.commit(
            message["update"], message["buckets"], kept=message.get("kept", ()), stored=self._stored
        )
        versions.serving = self.receiver.version
        with memory.no_requests(scheduler):
            if not self._updater.flush_cache():
                raise RuntimeError("the cache of the old weights could not be dropped")
        return result | {"expected": _mine(message["expected"], self._rank)}

    def _stored(self, name: str) -> torch.Tensor:
        """A tensor as the checkpoint has it."""
        from safetensors import safe_open

        folder = Path(self._runner.model_config.model_path)
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as shard:
                if name in shard.keys():  # noqa: SIM118 - a shard is not a mapping
                    found: torch.Tensor = shard.get_tensor(name)
                    return found
        raise ValueError(f"the checkpoint in {folder} has no tensor {name}")

    def _discard(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.receiver.discard()
        return {}


def running(scheduler: Any) -> list[Any]:
    """Requests whose tokens are being drawn."""
    found = list(scheduler.running_batch.reqs)
    if scheduler.last_batch is not None:
        found += scheduler.last_batch.reqs
    return list({request.rid: request for request in found if not request.finished()}.values())


_controls: dict[int, Control] = {}


def control_of(updater: Any) -> Control:
    """The one of this process."""
    if id(updater) not in _controls:
        _controls[id(updater)] = Control(updater)
    return _controls[id(updater)]


def _checkpoint(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of the checkpoint, from the files' heads."""
    from safetensors import safe_open

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a shard is not a mapping
                part = shard.get_slice(name)
                found[name] = (tuple(part.get_shape()), kinds.get(part.get_dtype(), torch.uint8))
    return found
