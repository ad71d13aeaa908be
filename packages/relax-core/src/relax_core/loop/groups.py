"""Completions of one prompt, scored; and the columns that they give the trainer.

Axes: N completions of a batch, L tokens of one sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from relax_rollout import DraftCounts
from relax_rollout.rewards import RewardResult

from relax_core.data import Prompt
from relax_core.loop.trajectory import Trajectory
from relax_core.trainer.sample import Sample


@dataclass(frozen=True)
class Scored:
    """A completion with its text and what the reward said of it."""

    trajectory: Trajectory
    text: str
    result: RewardResult


@dataclass(frozen=True)
class Group:
    """All completions of one prompt."""

    prompt: Prompt
    members: tuple[Scored, ...]

    @property
    def scores(self) -> list[float]:
        """The rewards, in the order of the members."""
        return [member.result.score for member in self.members]

    @property
    def drawn_count(self) -> int:
        """Tokens that the model drew."""
        return sum(member.trajectory.drawn_count for member in self.members)


def group_state(group: Group) -> list[dict[str, Any]]:
    """The members as plain values; the prompt is drawn again."""
    return [asdict(member) for member in group.members]


def restore_group(prompt: Prompt, members: Sequence[Mapping[str, Any]]) -> Group:
    """The group of `prompt` from what `group_state` gave."""
    return Group(prompt, tuple(_restore(member) for member in members))


def _restore(member: Mapping[str, Any]) -> Scored:
    return Scored(Trajectory.restore(member["trajectory"]), member["text"], RewardResult(**member["result"]))


def group_samples(groups: Sequence[Group], *, mask_truncated: bool = False) -> list[Sample]:
    """The completions as samples, group by group: the tokens that the model drew are the targets.

    Their column `rollout_logprob` holds the engine's log-probs.

    Args:
        groups: of a step.
        mask_truncated: leaves completions that did not end by themselves without a target.
    """
    samples = []
    for number, group in enumerate(groups):
        prompt_ids = group.prompt.prompt_ids
        pictures = tuple(one.load() for one in group.prompt.pictures)
        for member in group.members:
            trajectory = member.trajectory
            mask_L = torch.zeros(len(prompt_ids) + len(trajectory.token_ids))
            if not (mask_truncated and trajectory.truncated):
                mask_L[len(prompt_ids) :] = torch.tensor(trajectory.drawn, dtype=torch.float32)
            logprob_L = torch.zeros_like(mask_L)
            logprob_L[len(prompt_ids) :] = torch.tensor(trajectory.logprobs)
            tokens_L = torch.tensor((*prompt_ids, *trajectory.token_ids))
            columns = {"rollout_logprob": logprob_L}
            samples.append(Sample(tokens_L, mask_L, number, columns, pictures))
    return samples


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the completions of a step look like; names as in `relax_core.run.metrics`."""
    members = [member for group in groups for member in group.members]
    trajectories = [member.trajectory for member in members]
    lengths = [trajectory.drawn_count for trajectory in trajectories]
    judged = [float(m.result.correct) for m in members if m.result.correct is not None]
    metrics = {
        "reward": fmean(member.result.score for member in members),
        "reward_std": fmean(pstdev(group.scores) for group in groups),
        "response_length_mean": fmean(lengths),
        "response_length_max": max(lengths),
        "truncated_fraction": fmean(trajectory.truncated for trajectory in trajectories),
        "reward_failures": sum(member.result.error is not None for member in members),
    }
    if judged:
        metrics["accuracy"] = fmean(judged)
    drafts = sum((t.drafts for t in trajectories if t.drafts is not None), DraftCounts())
    if drafts.steps:
        metrics |= {"draft_acceptance": drafts.rate, "draft_length": drafts.length}
    return metrics


def turn_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """How completions of several turns went.

    Returns:
        `turns_mean` of the model, and `reply_tokens_mean` of its environment, for each completion.
    """
    trajectories = [member.trajectory for group in groups for member in group.members]
    return {
        "turns_mean": fmean(trajectory.turns for trajectory in trajectories),
        "reply_tokens_mean": fmean(len(t.token_ids) - t.drawn_count for t in trajectories),
    }


def sample_records(groups: Sequence[Group], advantages_N: Sequence[float]) -> list[dict[str, Any]]:
    """Lines of `samples.jsonl`, one completion each: the first of every group, then the second, and so on.

    Args:
        groups: the step's.
        advantages_N: of their completions, group by group.
    """
    advantage = iter(advantages_N)
    records = [
        (place, _record(group.prompt, member, next(advantage)))
        for group in groups
        for place, member in enumerate(group.members)
    ]
    return [record for _, record in sorted(records, key=lambda numbered: numbered[0])]


def _record(prompt: Prompt, member: Scored, advantage: float) -> dict[str, Any]:
    trajectory = member.trajectory
    versions = trajectory.drawn_versions
    return {
        "prompt": prompt.prompt_text,
        "completion": member.text,
        "answer": prompt.answer,
        "reward": member.result.score,
        "correct": member.result.correct,
        "advantage": advantage,
        "tokens": trajectory.drawn_count,
        "turns": trajectory.turns,
        "version": versions[-1] if versions else None,
        "finish_reason": trajectory.finish_reason,
        "error": member.result.error,
    }
