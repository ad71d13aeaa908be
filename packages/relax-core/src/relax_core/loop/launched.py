"""A run on ranks that a launcher (torchrun) started: the first drives it, the others follow its calls."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from relax_rollout import RolloutEngine
from torch import Tensor

from relax_core.config.root import RelaxConfig
from relax_core.data import load_tokenizer
from relax_core.loop.checkpoints import open_model
from relax_core.loop.local import LocalPolicy, open_policy
from relax_core.loop.policy import Scored, Trained
from relax_core.loop.rollout import open_local_rollout
from relax_core.loop.session import Session
from relax_core.loop.weights import retried
from relax_core.run.trace import ProcessSpans, keeping_spans
from relax_core.trainer.objective import TrainingObjective
from relax_core.trainer.sample import Sample
from relax_core.trainer.step_metrics import StepMetrics

# Nobody calls while the first rank samples or waits for rewards.
_PATIENCE = timedelta(days=7)


class Calls:
    """What the first rank does with the policy, told to the others; made on all ranks at once."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def tell(self, name: str | None, *arguments: Any, **options: Any) -> None:
        """Called on the first rank; None ends the others."""
        dist.broadcast_object_list([(name, arguments, options)], src=0, group=self._group)

    def heard(self) -> tuple[str | None, Sequence[Any], Mapping[str, Any]]:
        """The next call, on the other ranks.

        Raises:
            RuntimeError: the first rank has gone.
        """
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        name, arguments, options = box[0]
        return name, arguments, options

    def collect(self, value: Any) -> list[Any]:
        """Called on all ranks at once: their values on the first, in order; nothing on the others."""
        first = dist.get_rank() == 0
        found: list[Any] = [None] * dist.get_world_size() if first else []
        dist.gather_object(value, found if first else None, dst=0, group=self._group)
        return found


class LaunchedPolicy:
    """A `Policy` that lies on all ranks; lives on the first."""

    def __init__(self, policy: LocalPolicy, calls: Calls) -> None:
        self._policy = policy
        self._calls = calls

    def score(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, of: Scored = "policy"
    ) -> list[Tensor]:
        """See `Policy`."""
        self._calls.tell("score", samples, temperature=temperature, of=of)
        return self._policy.score(samples, temperature=temperature, of=of)

    def step(
        self, samples: Sequence[Sample], objective: TrainingObjective, *, of: Trained = "policy"
    ) -> StepMetrics:
        """See `Policy`."""
        self._calls.tell("step", samples, objective, of=of)
        return self._policy.step(samples, objective, of=of)

    async def update(self, engine: RolloutEngine, version: int) -> int:
        """See `Policy`; the engine is the first rank's."""

        async def once() -> int:
            self._calls.tell("update")
            return await self._policy.update_once(engine, version)

        return await retried(once, version)

    def export(self, directory: Path) -> None:
        """See `Policy`."""
        self._calls.tell("export", directory)
        self._policy.export(directory)

    def save_to(self, root: Path, *, keep: int, asynchronous: bool) -> None:
        """See `Policy`."""
        self._calls.tell("save_to", root, keep=keep, asynchronous=asynchronous)
        self._policy.save_to(root, keep=keep, asynchronous=asynchronous)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """See `Policy`."""
        self._calls.tell("save", step, state)
        self._policy.save(step, state)

    def finish_saves(self) -> None:
        """See `Policy`."""
        self._calls.tell("finish_saves")
        self._policy.finish_saves()

    def load(self, directory: Path) -> dict[str, Any]:
        """See `Policy`."""
        self._calls.tell("load", directory)
        return self._policy.load(directory)

    def chip(self) -> str:
        """See `Policy`; this process is the first rank."""
        return self._policy.chip()

    def watch(self, folder: Path) -> None:
        """See `Policy`."""
        self._calls.tell("watch", folder)
        self._policy.watch(folder)

    def begin_window(self, step: int) -> None:
        """See `Policy`."""
        self._calls.tell("begin_window", step)
        self._policy.begin_window(step)

    def end_window(self) -> None:
        """See `Policy`."""
        self._calls.tell("end_window")
        self._policy.end_window()

    def spans(self) -> Sequence[ProcessSpans]:
        """See `Policy`; those of the other ranks."""
        self._calls.tell("spans")
        return self._calls.collect(None)[1:]


@contextmanager
def open_launched_session(config: RelaxConfig) -> Iterator[Session[LaunchedPolicy]]:
    """The session of the first rank, which samples beside its share of the model.

    Raises:
        ValueError: the checkpoint does not fit, naming every tensor or setting that is wrong.
    """
    source, weights = open_model(config)
    tokenizer = load_tokenizer(source.path)
    with open_policy(config, source, weights) as policy:
        calls = Calls()
        device = str(policy.world.torch_device)
        rollout = partial(open_local_rollout, config, source.path, device)
        yield Session(source, tokenizer, LaunchedPolicy(policy, calls), rollout)
        # A run that fails ends its process instead, and with it the others'.
        calls.tell(None)


def follow(config: RelaxConfig) -> None:
    """Takes part in a run as one of its other ranks, until the first one ends it.

    Raises:
        ValueError: what the first rank raises too.
        RuntimeError: the first rank has gone.
    """
    source, weights = open_model(config)
    with ExitStack() as stack:
        policy = stack.enter_context(open_policy(config, source, weights))
        log = stack.enter_context(keeping_spans(f"rank {policy.world.rank}")) if config.run.trace else None
        calls = Calls()
        # The first rank ends after its step, and these with it.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            name, arguments, options = calls.heard()
            if name is None:
                return
            if name == "spans":
                calls.collect(log.take() if log is not None else None)
            elif name == "update":
                for _ in policy.changing_tensors():
                    pass
            else:
                getattr(policy, name)(*arguments, **options)
