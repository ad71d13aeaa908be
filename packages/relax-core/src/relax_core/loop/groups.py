"""Completions of one prompt, scored; and the columns that they give the trainer.

Axes: N completions of a batch, L tokens of one sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from relax_rollout import Completion, DraftCounts
from relax_rollout.rewards import RewardResult

from relax_core.data import Prompt
from relax_core.trainer.sample import Sample


@dataclass(frozen=True)
class Scored:
    """A completion with its text and what the reward said of it."""

    completion: Completion
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


def group_state(group: Group) -> list[dict[str, Any]]:
    """The members as plain values; the prompt is drawn again."""
    return [asdict(member) for member in group.members]


def restore_group(prompt: Prompt, members: Sequence[Mapping[str, Any]]) -> Group:
    """The group of `prompt` from what `group_state` gave."""
    return Group(prompt, tuple(_restore(member) for member in members))


def _restore(member: Mapping[str, Any]) -> Scored:
    completion = dict(member["completion"])
    if completion["drafts"] is not None:
        completion["drafts"] = DraftCounts(**completion["drafts"])
    return Scored(Completion(**completion), member["text"], RewardResult(**member["result"]))


def group_samples(groups: Sequence[Group]) -> list[Sample]:
    """The completions as samples, group by group: the completion's tokens are the targets.

    Their column `rollout_logprob` holds the engine's log-probs.
    """
    samples = []
    for number, group in enumerate(groups):
        prompt_ids = group.prompt.prompt_ids
        for member in group.members:
            completion = member.completion
            mask_L = torch.zeros(len(prompt_ids) + len(completion.token_ids))
            mask_L[len(prompt_ids) :] = 1
            logprob_L = torch.zeros_like(mask_L)
            logprob_L[len(prompt_ids) :] = torch.tensor(completion.logprobs)
            tokens_L = torch.tensor((*prompt_ids, *completion.token_ids))
            samples.append(Sample(tokens_L, mask_L, number, {"rollout_logprob": logprob_L}))
    return samples


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the completions of a step look like; names as in `relax_core.run.metrics`."""
    members = [member for group in groups for member in group.members]
    lengths = [len(member.completion.token_ids) for member in members]
    judged = [float(m.result.correct) for m in members if m.result.correct is not None]
    metrics = {
        "reward": fmean(member.result.score for member in members),
        "reward_std": fmean(pstdev(group.scores) for group in groups),
        "response_length_mean": fmean(lengths),
        "response_length_max": max(lengths),
        "truncated_fraction": fmean(member.completion.finish_reason == "length" for member in members),
        "reward_failures": sum(member.result.error is not None for member in members),
    }
    if judged:
        metrics["accuracy"] = fmean(judged)
    drafts = sum((m.completion.drafts for m in members if m.completion.drafts is not None), DraftCounts())
    if drafts.steps:
        metrics |= {"draft_acceptance": drafts.rate, "draft_length": drafts.length}
    return metrics


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
    completion = member.completion
    return {
        "prompt": prompt.prompt_text,
        "completion": member.text,
        "answer": prompt.answer,
        "reward": member.result.score,
        "correct": member.result.correct,
        "advantage": advantage,
        "tokens": len(completion.token_ids),
        "version": completion.versions[-1] if completion.versions else None,
        "finish_reason": completion.finish_reason,
        "error": member.result.error,
    }
