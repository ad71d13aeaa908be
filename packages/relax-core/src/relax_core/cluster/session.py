"""A session whose policy, engines and rewards are processes of a cluster."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import ray
from relax_bridge import ModelMap

from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.engine_host import EngineHost
from relax_core.cluster.engines import EngineGroup
from relax_core.cluster.event_thread import EventThread
from relax_core.cluster.plan import plan_placement
from relax_core.cluster.policy import RayPolicy
from relax_core.cluster.ray_process import open_ray
from relax_core.cluster.reward_tasks import TaskPool, free_seats
from relax_core.cluster.seats import Seats, open_seats
from relax_core.cluster.stream import stream_cpus
from relax_core.config.root import RelaxConfig
from relax_core.data import load_tokenizer
from relax_core.device.registry import choose_device
from relax_core.loop.checkpoints import open_model
from relax_core.loop.rollout import Rollout, engine_devices, open_environment, open_rewards
from relax_core.loop.session import Session

_BYTES = {"fp32": 4, "bf16": 2}
_SEATS_S = 300.0


@contextmanager
def open_cluster_session(config: RelaxConfig) -> Iterator[Session[RayPolicy]]:
    """Starts or joins Ray and starts the trainer ranks and the engines on it; ends what it started.

    Raises:
        ClusterError: Ray cannot be had, or has too little for the run.
        ValueError: the checkpoint does not fit.
    """
    source, weights = open_model(config)
    device = choose_device(config.run.device)
    samples = config.algorithm.algorithm.loop == "rl"
    plan = plan_placement(
        config.cluster, device, engine_devices(config), config.reward.concurrency if samples else 0
    )
    threads = config.run.threads or max(1, len(os.sched_getaffinity(0)) // _at_once(config))
    cpus = sum(int(bundle["CPU"]) for bundle in plan.bundles) + stream_cpus(config.cluster)
    beside = ThreadPoolExecutor(1, thread_name_prefix="relax-tokenizer")
    tokenizer = beside.submit(load_tokenizer, source.path)
    with (
        beside,
        open_ray(config.cluster, cpus=cpus, weight_bytes=_weight_bytes(config, weights)),
        open_seats(plan, timeout_s=_SEATS_S) as seats,
    ):
        # Ranks and engines load while this process reads the data: nobody waits for them before.
        policy = RayPolicy(config, seats, threads)
        start = partial(_start_engine, config, source.path, device, threads, seats, policy)
        count = config.cluster.engines if samples else 0
        engines = EngineGroup(
            start,
            count,
            max_restarts=config.cluster.max_restarts,
            timeout_s=config.cluster.engine_timeout_s,
        )
        try:
            rollout = partial(_open_rollout, config, engines, plan.shared_engines, seats.tasks())
            yield Session(source, tokenizer.result(), policy, rollout)
        finally:
            policy.close()


@contextmanager
def _open_rollout(
    config: RelaxConfig, engines: EngineGroup, shared: int, tasks: Sequence[Mapping[str, Any]]
) -> Iterator[Rollout]:
    start_pool = partial(TaskPool, free_seats(tasks))
    with (
        EventThread() as runner,
        open_rewards(config, start_pool) as rewards,
        open_environment(config, start_pool) as environment,
    ):
        runner.run(engines.open())
        training = partial(_training, config.cluster, engines, runner, shared)
        try:
            spans = lambda: runner.run(engines.spans())  # noqa: E731
            yield Rollout(engines, rewards, runner, environment, training, engines.exposed, spans)
        finally:
            runner.run(engines.close())


@contextmanager
def _training(
    cluster: ClusterConfig, engines: EngineGroup, runner: EventThread, shared: int
) -> Iterator[None]:
    """Engines on the trainer's devices give up their memory meanwhile."""
    if cluster.placement == "colocate":
        runner.run(engines.release_memory())
        yield
        runner.run(engines.reclaim_memory())
    elif cluster.placement == "hybrid":
        runner.run(engines.rest(shared))
        yield
        runner.run(engines.wake())
    else:
        yield


def _start_engine(
    config: RelaxConfig,
    model: Path,
    device: str,
    threads: int,
    seats: Seats,
    policy: RayPolicy,
    number: int,
) -> Any:
    # Ray shows each process its own devices alone; what belongs to ranks an engine is told of.
    place = device if device == "cpu" else f"{device}:0"
    options = seats.engine(number) | {"max_concurrency": 1000}
    visible = policy.devices_of_engine(number)
    return ray.remote(EngineHost).options(**options).remote(config, model, place, threads, visible, number)


def _at_once(config: RelaxConfig) -> int:
    """How many processes compute at the same time."""
    cluster = config.cluster
    together = {"colocate": max(cluster.trainer_ranks, cluster.engines)}
    return together.get(cluster.placement, cluster.trainer_ranks + cluster.engines)


def _weight_bytes(config: RelaxConfig, weights: ModelMap) -> int:
    return sum(prod(shape) for shape in weights.hf_shapes().values()) * _BYTES[config.trainer.precision]
