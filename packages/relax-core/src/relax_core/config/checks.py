"""Rules that span sections: each names the sections it reads and runs once those are valid by themselves."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from relax_core.config.problems import Problem
from relax_core.loop.config import RolloutConfig
from relax_core.run.config import RunConfig
from relax_core.trainer.config import TrainerConfig


@dataclass(frozen=True)
class Check:
    """A rule over some sections, in the order of the rule's arguments."""

    sections: tuple[str, ...]
    rule: Callable[..., Iterator[Problem]]


def cross_problems(sections: Mapping[str, BaseModel]) -> list[Problem]:
    """Applies every rule whose sections are all present.

    Args:
        sections: the valid sections by name.

    Returns:
        What the rules object to.
    """
    return [
        problem
        for check in CHECKS
        if all(name in sections for name in check.sections)
        for problem in check.rule(*(sections[name] for name in check.sections))
    ]


def _warmup_fits(trainer: TrainerConfig, run: RunConfig) -> Iterator[Problem]:
    updates = run.steps * trainer.optimizer_steps_per_batch
    if trainer.warmup_steps > updates:
        yield Problem(
            ("trainer", "warmup_steps"),
            f"the warm-up is longer than the run: {run.steps} steps of {trainer.optimizer_steps_per_batch} "
            f"optimizer steps make {updates}",
            given=str(trainer.warmup_steps),
            allowed=f"an integer, at most {updates}",
        )


def _batch_can_be_split(rollout: RolloutConfig, trainer: TrainerConfig) -> Iterator[Problem]:
    groups = rollout.prompts_per_step
    if trainer.optimizer_steps_per_batch > groups:
        yield Problem(
            ("trainer", "optimizer_steps_per_batch"),
            f"a batch of rollout.prompts_per_step = {groups} groups cannot be split into more parts than groups",
            given=str(trainer.optimizer_steps_per_batch),
            allowed=f"an integer, at most {groups}",
        )


CHECKS: tuple[Check, ...] = (
    Check(("trainer", "run"), _warmup_fits),
    Check(("rollout", "trainer"), _batch_can_be_split),
)
