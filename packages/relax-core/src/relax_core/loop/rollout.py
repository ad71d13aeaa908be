"""What samples and scores: in this process, or on the workers of a cluster."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from relax_rollout import RolloutEngine, create_engine
from relax_rollout.rewards import Reward, RewardInput, RewardResult, RewardRunner, load_reward
from relax_rollout.rewards.runner import Pool, RewardLimits

from relax_core.config.root import RelaxConfig
from relax_core.loop.environments.protocol import EnvironmentFactory, load_environment
from relax_core.loop.environments.tools import Tools
from relax_core.loop.update_path import TRANSPORTS, update_folder
from relax_core.run.trace import ProcessSpans

T = TypeVar("T")


class Scorer(Protocol):
    """Judges completions."""

    async def score(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """One result for each, in order; a failing reward gives a result too."""
        ...


class Runner(Protocol):
    """Runs coroutines to their end for code that is none itself; all on one event loop."""

    def run(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """What the coroutine returns."""
        ...


@dataclass(frozen=True)
class Rollout:
    """What a loop samples and scores with.

    Attributes:
        engine: samples.
        scorer: judges.
        runner: runs what they do.
        environment: makes what answers the model in a completion; None where nothing does.
        training: entered while the policy trains; takes the engine's memory meanwhile where both share
            devices.
        exposed: of the seconds that the last weight update took, those in which nothing was sampled either.
        spans: what engines in other processes did since they were asked last, in a run with a timeline.
    """

    engine: RolloutEngine
    scorer: Scorer
    runner: Runner
    environment: EnvironmentFactory | None = None
    training: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    exposed: Callable[[float], float] = field(default=lambda seconds: seconds)
    spans: Callable[[], Sequence[ProcessSpans]] = tuple


@contextmanager
def open_local_rollout(config: RelaxConfig, model: Path, device: str) -> Iterator[Rollout]:
    """An engine in this process and a reward in processes beside it; ends them.

    Args:
        config: the run's.
        model: Hugging Face directory that the engine starts from.
        device: where it samples, such as "cuda:0".
    """
    with asyncio.Runner() as runner, open_rewards(config) as rewards, open_environment(config) as environment:
        engine = create_engine(config.rollout.engine, **engine_options(config, model, device))
        try:
            yield Rollout(engine, rewards, runner, environment)
        finally:
            runner.run(engine.close())


def engine_devices(config: RelaxConfig) -> int:
    """Devices of one engine."""
    servers = config.rollout.engine == "sglang" and not config.rollout.urls
    return config.sglang.tensor if servers else 1


def engine_options(config: RelaxConfig, model: Path, device: str) -> dict[str, Any]:
    """What the engine is created with; an engine from elsewhere gets the model alone."""
    rollout = config.rollout
    options: dict[str, Any] = {"model": model}
    if rollout.engine in ("transformers", "sglang"):
        options |= {
            "dtype": "bfloat16" if config.trainer.precision == "bf16" else "float32",
            "device": device,
            "max_rows": rollout.max_batch_size,
        }
    if rollout.engine == "transformers":
        options["pictures"] = config.model.vision != "absent"
    if rollout.engine == "sglang":
        options |= {
            "device": device.partition(":")[0],
            "servers": rollout.servers,
            "urls": rollout.urls,
            "router": rollout.router,
            "draft_tokens": rollout.draft_tokens,
            "tensor_parallel": config.sglang.tensor,
            "max_tokens": config.sglang.max_tokens,
            "arguments": config.sglang.command_line,
            "transport": TRANSPORTS[rollout.update_path],
        }
        if rollout.update_path == "disk":
            folder = update_folder(config)
            folder.mkdir(parents=True, exist_ok=True)
            options["folder"] = folder
    return options


@contextmanager
def open_environment(
    config: RelaxConfig, start_pool: Callable[[Reward, RewardLimits], Pool] | None = None
) -> Iterator[EnvironmentFactory | None]:
    """What answers the model; ends its processes.

    Args:
        config: the run's.
        start_pool: see `Tools`.

    Raises:
        ValueError: `environment` names what cannot be imported.
    """
    environment = config.environment
    if environment.name is None:
        yield None
    elif environment.name != "tools":
        yield load_environment(environment.name)
    else:
        with Tools(
            environment.tools,
            timeout_s=environment.timeout_s,
            concurrency=environment.concurrency,
            start_pool=start_pool,
        ) as tools:
            yield tools.environment


def open_rewards(
    config: RelaxConfig, start_pool: Callable[[Reward, RewardLimits], Pool] | None = None
) -> RewardRunner:
    """The run's reward; close it when done.

    Args:
        config: the run's.
        start_pool: see `RewardRunner`.
    """
    return RewardRunner(
        load_reward(config.reward.function),
        config.reward.timeout_s,
        config.reward.concurrency,
        fallback_score=config.reward.failed_score,
        start_pool=start_pool,
    )
