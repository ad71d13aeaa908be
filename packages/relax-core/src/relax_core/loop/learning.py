"""What a step of reinforcement learning does with scored completions: advantages, and optimizer steps."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from relax_rollout.scoring import score_tokens

from relax_core.algorithms.shaping import overlong_penalty
from relax_core.config.root import RelaxConfig
from relax_core.loop.advantages import token_columns, with_advantages, with_value_targets
from relax_core.loop.groups import Group, group_samples
from relax_core.loop.metrics import training_metrics
from relax_core.loop.objectives import PolicyObjective
from relax_core.loop.policy import Policy, Scored
from relax_core.loop.rollout import Runner
from relax_core.loop.values import ValueObjective, explained_variance
from relax_core.run import Recorder
from relax_core.trainer.sample import Sample

_OF_THE_CRITIC = {
    "value_loss": "value_loss",
    "value": "value",
    "value_clip_fraction": "value_clip_fraction",
    "grad_norm": "critic_grad_norm",
    "lr": "critic_lr",
}


class Learner:
    """Trains the policy, and its critic if the algorithm has one, on groups.

    Args:
        config: the run's.
        policy: the models.
        recorder: is told of the phases.
        runner: runs what a teacher in servers does.
    """

    def __init__(
        self, config: RelaxConfig, policy: Policy, recorder: Recorder, runner: Runner | None = None
    ) -> None:
        self._config = config
        self._policy = policy
        self._recorder = recorder
        self._runner = runner

    def samples(self, groups: Sequence[Group]) -> list[Sample]:
        """Samples with advantages, and with what the algorithm needs beside the engine's log-probs."""
        config = self._config.algorithm
        samples = group_samples(groups, mask_truncated=config.mask_truncated)
        with self._recorder.phase("logprob"):
            if config.needs_old_logprob(self._config.trainer.optimizer_steps_per_batch):
                samples = self._scored("old_logprob", samples, "policy")
            if config.needs_reference:
                samples = self._scored("ref_logprob", samples, "reference")
            if config.algorithm.needs_teacher:
                samples = self._taught(samples)
            if config.algorithm.needs_critic:
                samples = self._scored("value", samples, "critic")
        scores = self._shaped_scores(groups)
        if config.algorithm.needs_critic:
            samples = with_value_targets(samples, scores, config)
        return with_advantages(samples, scores, config)

    def train(self, step: int, samples: Sequence[Sample]) -> dict[str, float]:
        """The optimizer steps of step `step`; metrics by name."""
        parts = split_groups(samples, self._config.trainer.optimizer_steps_per_batch)
        config, longest = self._config.algorithm, self._config.rollout.max_new_tokens
        metrics: dict[str, float] = {}
        if config.algorithm.needs_teacher:
            columns = token_columns(samples)
            metrics["teacher_kl"] = float((columns["old_logprob"] - columns["teacher_logprob"]).mean())
        if config.algorithm.needs_critic:
            values = ValueObjective(config, max_new_tokens=longest)
            found = training_metrics([self._policy.step(part, values, of="critic") for part in parts])
            metrics |= {name: found[key] for key, name in _OF_THE_CRITIC.items()}
            metrics["explained_variance"] = explained_variance(samples)
            if step <= self._config.critic.warmup_steps:
                return metrics
        objective = PolicyObjective(
            config,
            temperature=self._config.rollout.temperature,
            max_new_tokens=longest,
            on_policy=self._on_policy,
        )
        return metrics | training_metrics([self._policy.step(part, objective) for part in parts])

    def _shaped_scores(self, groups: Sequence[Group]) -> list[float]:
        reward, longest = self._config.reward, self._config.rollout.max_new_tokens
        return [
            member.result.score
            - reward.overlong_penalty
            * overlong_penalty(member.trajectory.drawn_count, longest=longest, zone=reward.overlong_tokens)
            for group in groups
            for member in group.members
        ]

    def _scored(self, column: str, samples: Sequence[Sample], of: Scored) -> list[Sample]:
        scores = self._policy.score(samples, temperature=self._config.rollout.temperature, of=of)
        return [sample.with_columns(**{column: score}) for sample, score in zip(samples, scores, strict=True)]

    def _taught(self, samples: Sequence[Sample]) -> list[Sample]:
        """Samples with the teacher's log-probs, from the trainer or from servers."""
        urls = self._config.teacher.urls
        if not urls:
            return self._scored("teacher_logprob", samples, "teacher")
        assert self._runner is not None, "a teacher in servers needs a runner"
        found = self._runner.run(score_tokens(urls, [sample.tokens_L.tolist() for sample in samples]))
        return [
            sample.with_columns(teacher_logprob=torch.tensor(scores) * (sample.mask_L > 0))
            for sample, scores in zip(samples, found, strict=True)
        ]

    @property
    def _on_policy(self) -> bool:
        return self._config.trainer.optimizer_steps_per_batch == 1


def split_groups(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Splits samples into `parts` mini-batches of whole groups, as equal in groups as possible, in order."""
    groups = sorted({sample.group for sample in samples})
    bounds = [len(groups) * i // parts for i in range(parts + 1)]
    members = [set(groups[a:b]) for a, b in pairwise(bounds) if b > a]
    return [[sample for sample in samples if sample.group in part] for part in members]
