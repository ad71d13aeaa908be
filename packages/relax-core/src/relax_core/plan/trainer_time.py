"""Time of one optimizer step: operations at the device's rates, the pipeline's bubble, the optimizer.

An operation takes the longer of its arithmetic and its reads and writes; what it sends to other ranks comes
on top. The host launches operations ahead of the device: a pass takes the longer of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from relax_core.plan.devices import DeviceSpec
from relax_core.plan.parameters import Count, stage_parameters
from relax_core.plan.stage import Stage
from relax_core.plan.tape import Work
from relax_core.plan.trainer_memory import number_size
from relax_core.trainer.config import TrainerConfig


@dataclass(frozen=True)
class Layout:
    """How ranks lie on hosts.

    Attributes:
        ranks: all trainer ranks.
        tensor, context, pipeline, expert: sizes of the groups that exchange something.
        data: data-parallel ranks.
    """

    ranks: int
    tensor: int
    context: int
    pipeline: int
    expert: int
    data: int

    def spans(self, over: str) -> int:
        """Consecutive ranks within which a group of the axis `over` lies (Megatron counts tensor fastest,
        then context, then data, then pipeline)."""
        inner = self.tensor * self.context
        return {
            "tensor": self.tensor,
            "context": inner,
            "expert": max(self.expert, self.tensor),
            "data": inner * self.data,
            "pipeline": self.ranks,
        }[over]


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass of one micro-batch by kind of work; `host` is the host's own time beside them."""

    kinds: dict[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def device(self) -> float:
        """Seconds in which the device works or sends."""
        return sum(self.kinds.values())

    @property
    def total(self) -> float:
        """Seconds that pass."""
        return max(self.device, self.host)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step.

    Attributes:
        forward, backward: one micro-batch on the slowest stage.
        micro_batches: of a rank.
        bubble: seconds in which the slowest stage waits for the pipeline.
        reduce: gradients over data-parallel ranks, and updated weights back.
        optimizer: the update itself.
        flops: operations of the step on one rank, without recomputation: 3 forward passes' worth.
    """

    forward: PassTime
    backward: PassTime
    micro_batches: int
    bubble: float
    reduce: float
    optimizer: float
    flops: float

    @property
    def total(self) -> float:
        """All of it."""
        passes = (self.forward.total + self.backward.total) * self.micro_batches
        return passes + self.bubble + self.reduce + self.optimizer


def seconds(work: Work, device: DeviceSpec, layout: Layout) -> dict[str, float]:
    """Seconds by kind: the operation's own, and "communication"."""
    shares = device.shares
    reached = {
        "matmul": shares.matmul,
        "attention": shares.attention,
        "dense attention": shares.dense_attention,
        "scan": shares.scan,
    }
    rate = device.flops * reached.get(work.kind, 1.0)
    own = max(work.flops / rate, work.moved / (device.bandwidth * shares.memory))
    own += work.chain * device.chunk_seconds
    found = {work.kind: own} if own else {}
    if work.sent:
        inside = layout.spans(work.over) <= device.per_host
        found["communication"] = work.sent / ((device.link if inside else device.network) * shares.link)
    return found


def pass_times(stage: Stage, device: DeviceSpec, layout: Layout) -> tuple[PassTime, PassTime]:
    """Forward and backward pass of one micro-batch; what is computed again counts to the backward pass."""
    totals: tuple[dict[str, float], dict[str, float]] = ({}, {})
    launches = [0.0, 0.0]
    for _name, *works in stage.tape().works():
        for index, work in enumerate(works):
            if work == Work():
                continue
            launches[index] += 1
            for kind, time in seconds(work, device, layout).items():
                totals[index][kind] = totals[index].get(kind, 0.0) + time
    forward, backward = (
        PassTime(kinds, count * device.op_seconds) for kinds, count in zip(totals, launches, strict=True)
    )
    return forward, backward


def step_time(
    stages: Sequence[Stage],
    config: TrainerConfig,
    device: DeviceSpec,
    layout: Layout,
    *,
    micro_batches: int,
) -> StepTime:
    """One optimizer step of `micro_batches` micro-batches a rank."""
    parallel = stages[0].local.parallel
    slowest = max(
        (pass_times(stage, device, layout) for stage in stages), key=lambda p: p[0].total + p[1].total
    )
    forward, backward = slowest
    # Narayanan et al. 2021, arXiv 2104.04473, section 2.2: (p - 1) / v micro-batches pass before the last
    # stage has work, and after the first has none.
    idle = (parallel.pipeline - 1) / parallel.pipeline_chunks
    parts = [stage_parameters(s.local, s.kinds, first=s.first, last=s.last) for s in stages]
    counts = [sum(one.values(), start=Count()) for one in parts]
    most = max(counts, key=lambda count: count.total)
    gradient = number_size(config.gradient_precision)
    shared = layout.data * layout.context
    weights = most.dense + most.wide + most.expert
    own = (most.dense + most.wide) / shared + most.expert / max(
        1, shared * layout.tensor // max(1, layout.expert)
    )
    memory = device.bandwidth * device.shares.memory
    link = (device.link if layout.spans("data") <= device.per_host else device.network) * device.shares.link
    sent = (most.dense + most.wide) * (gradient + number_size(config.precision)) * (shared - 1) / shared
    means = number_size(config.moment_precision)
    # Zeroed, read for the norm and read for the update; weights and both means are read and written.
    update = weights * gradient + own * (2 * gradient + 2 * (4 + 2 * means))
    # Linear layers add to the sum of gradients themselves; those of embedding, head and experts are read, and
    # added to what is there.
    apart = max(
        sum(count.total for part, count in one.items() if part in ("embedding", "head", "experts"))
        for one in parts
    )
    added = apart * (number_size(config.precision) + 2 * gradient) / memory
    kinds = {**backward.kinds, "gradients": added}
    backward = PassTime(kinds, backward.host)
    flops = sum(work.flops for s in stages for _n, work, _b in s.tape().works()) / len(stages)
    return StepTime(
        forward,
        backward,
        micro_batches,
        (forward.total + backward.total) * idle,
        sent / link if shared > 1 else 0.0,
        update / memory,
        3.0 * flops * micro_batches,
    )
