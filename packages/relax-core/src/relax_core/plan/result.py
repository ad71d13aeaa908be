"""What a plan says."""

from collections.abc import Mapping
from dataclasses import dataclass

from relax_core.config.problems import Problem
from relax_core.plan.devices import DeviceSpec
from relax_core.plan.engine_memory import EnginePlan
from relax_core.plan.engine_time import RolloutTime
from relax_core.plan.trainer import TrainerPlan
from relax_core.plan.workload import Workload


@dataclass(frozen=True)
class DeviceUse:
    """One device.

    Attributes:
        name: such as "rank 0 + engine 0".
        parts: bytes by kind at the moment named by `phase`.
        phase: when it is fullest: "sampling", "training" or "update".
        phases: bytes of each phase.
        limit: bytes that are there for torch and the engine.
    """

    name: str
    parts: Mapping[str, int]
    phase: str
    phases: Mapping[str, int]
    limit: int

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return self.phases[self.phase]


@dataclass(frozen=True)
class Plan:
    """Memory and time of a run, and what is wrong with its settings.

    Attributes:
        recipe: name or path.
        model: name of the model.
        parameters, active: weights of the model, and those that a token uses.
        device: what it was planned for.
        workload: the samples assumed.
        trainer: of one optimizer step; None where problems are so that nothing can be said.
        engine: of one engine; None without sampling.
        rollout: time of sampling; None without.
        devices: every device, ranks first.
        phases: seconds of one step by phase.
        problems: refusals.
        notes: assumptions and advice, for a person.
    """

    recipe: str
    model: str
    parameters: int
    active: int
    device: DeviceSpec
    workload: Workload
    trainer: TrainerPlan | None
    engine: EnginePlan | None
    rollout: RolloutTime | None
    devices: tuple[DeviceUse, ...]
    phases: Mapping[str, float]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """Seconds of one step: the phases one after the other, or what runs beside another hidden."""
        return self.phases.get("step", 0.0)

    @property
    def tokens_per_step(self) -> int:
        """Tokens trained in one step."""
        return sum(self.workload.lengths) * self.workload.optimizer_steps

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return all(use.peak <= use.limit for use in self.devices)
