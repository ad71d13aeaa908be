"""Rules that span sections: each names the sections it reads and runs once those are valid by themselves."""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from relax_core.algorithms.config import AlgorithmConfig
from relax_core.cluster.config import ClusterConfig
from relax_core.config.problems import Problem
from relax_core.config.rules import RULES, Check
from relax_core.config.yaml_text import show
from relax_core.data.config import DataConfig
from relax_core.device.parallel import ParallelConfig
from relax_core.loop.config import (
    CriticConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TeacherConfig,
)
from relax_core.loop.environments.config import EnvironmentConfig
from relax_core.model.lora_config import LoraConfig
from relax_core.model.mtp_config import MtpConfig
from relax_core.model.settings import ModelSettings
from relax_core.run.config import RunConfig
from relax_core.trainer.config import TrainerConfig


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
    """A learning rate that still rises when the run ends never reaches its peak."""
    updates = run.steps * trainer.optimizer_steps_per_batch
    if trainer.warmup_steps >= updates:
        yield Problem(
            ("trainer", "warmup_steps"),
            f"the warm-up takes the whole run: {run.steps} steps of {trainer.optimizer_steps_per_batch} "
            f"optimizer steps make {updates}",
            given=str(trainer.warmup_steps),
            allowed=f"an integer, at most {updates - 1}",
            nearest=str(updates - 1),
        )


def _batch_can_be_split(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, sft: SftConfig, trainer: TrainerConfig
) -> Iterator[Problem]:
    """A batch has no more parts than prompts or samples."""
    rl = algorithm.algorithm.loop == "rl"
    name, count = (
        ("rollout.prompts_per_step", rollout.prompts_per_step)
        if rl
        else ("sft.samples_per_step", sft.samples_per_step)
    )
    if trainer.optimizer_steps_per_batch > count:
        yield Problem(
            ("trainer", "optimizer_steps_per_batch"),
            f"a batch of {name} = {count} cannot be split into more parts",
            given=str(trainer.optimizer_steps_per_batch),
            allowed=f"an integer, at most {count}",
            nearest=str(count),
        )


def _group_gives_a_signal(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Advantages that compare the completions of a prompt need several of them."""
    least = algorithm.algorithm.min_group_size
    if algorithm.algorithm.loop == "rl" and rollout.samples_per_prompt < least:
        yield Problem(
            ("rollout", "samples_per_prompt"),
            f"algorithm {algorithm.name} compares the completions of one prompt",
            given=str(rollout.samples_per_prompt),
            allowed=f"an integer, at least {least}",
            nearest=str(least),
        )


def _policy_is_sampled(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Equal completions have equal rewards, from which nothing is learnt."""
    if algorithm.algorithm.loop == "rl" and rollout.temperature == 0:
        yield Problem(
            ("rollout", "temperature"),
            "at temperature 0 the completions of a prompt are all equal, and nothing is learnt",
            given="0.0",
            allowed="a number, above 0",
            nearest="1",
        )


def _evaluation_has_rows(evaluation: EvalConfig, data: DataConfig) -> Iterator[Problem]:
    """An evaluation needs held-out rows."""
    if evaluation.every and data.eval_path is None and data.eval_fraction == 0 and not evaluation.sets:
        yield Problem(
            ("eval", "every"),
            "there are no held-out rows: set data.eval_path, data.eval_fraction or eval.sets",
            given=str(evaluation.every),
            allowed="0 without held-out rows",
            nearest="0",
        )


def _ranks_hold_whole_models(cluster: ClusterConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Tensor x pipeline x context ranks hold one replica of the model."""
    size = parallel.model_size
    if cluster.trainer_ranks % size:
        given = (
            f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} = {size}"
        )
        yield Problem(
            ("cluster", "trainer_ranks"),
            f"the ranks cannot be divided into replicas of {given}"
            + ("; one process holds one rank" if cluster.mode == "inline" else ""),
            given=str(cluster.trainer_ranks),
            allowed=f"a multiple of {size}, with cluster.mode ray or under torchrun",
            nearest=f"{max(1, round(cluster.trainer_ranks / size)) * size}"
            + (" --cluster.mode ray" if cluster.mode == "inline" else ""),
        )


def _only_sampling_can_run_ahead(cluster: ClusterConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """An algorithm that samples nothing has no engines."""
    if algorithm.algorithm.loop == "rl":
        return
    for name, idle in (("placement", "colocate"), ("engines", 1)):
        if getattr(cluster, name) != idle:
            yield Problem(
                ("cluster", name),
                f"algorithm {algorithm.name} samples nothing",
                given=str(getattr(cluster, name)),
                allowed=str(idle),
                nearest=str(idle),
            )


def _only_samples_are_passed(evaluation: EvalConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """pass@k is of sampled completions."""
    if algorithm.algorithm.loop == "rl":
        return
    for name in ("sets", "pass_at"):
        if getattr(evaluation, name):
            yield Problem(
                ("eval", name),
                f"algorithm {algorithm.name} samples nothing; it is evaluated on data.eval_path",
                given=show(getattr(evaluation, name)),
                allowed="nothing",
                nearest=show(type(evaluation).model_fields[name].default),
            )


def _stale_samples_are_corrected(cluster: ClusterConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Completions of older weights need an importance correction."""
    if cluster.placement != "colocate":
        yield from _stale(algorithm, f"with placement {cluster.placement} completions are of older weights")


def _stale(algorithm: AlgorithmConfig, reason: str) -> Iterator[Problem]:
    """Tokens of older weights, in an algorithm that would take them for the present ones'."""
    if algorithm.algorithm.loop != "rl" or algorithm.corrects_stale_tokens:
        return
    if "correction" in algorithm.algorithm.settings:
        yield Problem(
            ("algorithm", "correction"),
            f"{reason}; nothing corrects for it",
            given="none",
            allowed="truncated or icepop",
            nearest="truncated",
        )
    else:
        yield Problem(
            ("algorithm", "name"),
            f"{reason}, and this algorithm neither has a correction nor a ratio to the engine's log-probs",
            given=algorithm.name,
            allowed="an algorithm with one of them, such as grpo or m2po",
        )


def _streams_sample_no_more_than_is_trained(
    cluster: ClusterConfig, rollout: RolloutConfig
) -> Iterator[Problem]:
    """Where sampling never stops there is no last completion to wait for."""
    if cluster.placement == "colocate":
        return
    for name, idle in (("over_sampling", "1"), ("early_abort", "off")):
        given = getattr(rollout, name)
        if given != type(rollout).model_fields[name].default:
            yield Problem(
                ("rollout", name),
                f"with placement {cluster.placement} no step waits for the last completions: sampling goes "
                "on while the trainer trains",
                given=str(given),
                allowed=f"{idle}, or cluster.placement colocate",
                nearest=show(type(rollout).model_fields[name].default),
            )


def _partial_rollouts_are_corrected(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Completions that hold tokens of older weights need an importance correction."""
    if rollout.early_abort == "continue":
        yield from _stale(
            algorithm, "with rollout.early_abort continue completions hold tokens of older weights"
        )


def _documents_are_fine_tuned_on(algorithm: AlgorithmConfig, data: DataConfig) -> Iterator[Problem]:
    """Bare text has neither a prompt to complete nor a pair to choose from."""
    if data.text_key is not None and algorithm.algorithm.loop != "sft":
        yield Problem(
            ("data", "text_key"),
            f"algorithm {algorithm.name} needs prompts, and documents have none",
            given=data.text_key,
            allowed="null, or algorithm.name sft",
            nearest="null",
        )


def _environments_need_conversations(environment: EnvironmentConfig, data: DataConfig) -> Iterator[Problem]:
    """Replies of an environment are turns of a conversation."""
    if environment.name is not None and not data.chat:
        yield Problem(
            ("data", "chat"),
            "replies are rendered through the chat template",
            given="false",
            allowed="true, or environment.name null",
            nearest="true",
        )


def _reference_is_read(algorithm: AlgorithmConfig, model: ModelSettings) -> Iterator[Problem]:
    """A reference policy is for a KL."""
    if model.reference_path is not None and not algorithm.needs_reference:
        yield Problem(
            ("model", "reference_path"),
            "without a KL no reference policy is needed",
            given=model.reference_path,
            allowed="null, or set algorithm.kl_loss_coef or algorithm.kl_reward_coef",
            nearest="null",
        )


def _on_policy_alone(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> Iterator[Problem]:
    """Without a policy ratio the second step on a batch has the wrong gradient."""
    if algorithm.algorithm.on_policy and trainer.optimizer_steps_per_batch > 1:
        yield Problem(
            ("trainer", "optimizer_steps_per_batch"),
            f"algorithm {algorithm.name} has no policy ratio: a batch is good for one step of the weights "
            "that sampled it",
            given=str(trainer.optimizer_steps_per_batch),
            allowed="1",
            nearest="1",
        )


def _groups_are_filtered(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """An algorithm that drops groups without spread has to be told to sample others."""
    if algorithm.algorithm.needs_dynamic_sampling and not rollout.dynamic_sampling:
        yield Problem(
            ("rollout", "dynamic_sampling"),
            f"algorithm {algorithm.name} drops groups whose rewards are all equal; without that it is grpo "
            "with algorithm.reduction token_mean",
            given="false",
            allowed="true",
            nearest="true",
        )


def _overlong_zone_fits(reward: RewardConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """The zone of the length penalty lies before the length at which completions are cut."""
    if reward.overlong_tokens > rollout.max_new_tokens:
        yield Problem(
            ("reward", "overlong_tokens"),
            f"completions are cut at {rollout.max_new_tokens} tokens, and the zone lies before that",
            given=str(reward.overlong_tokens),
            allowed=f"an integer, at most {rollout.max_new_tokens}",
            nearest=str(rollout.max_new_tokens),
        )


def _critic_is_trained(critic: CriticConfig, algorithm: AlgorithmConfig, run: RunConfig) -> Iterator[Problem]:
    """A critic's settings need an algorithm with a critic, and the policy a step to learn in."""
    if not algorithm.algorithm.needs_critic:
        for name, info in CriticConfig.model_fields.items():
            if getattr(critic, name) != info.default:
                yield Problem(
                    ("critic", name),
                    f"algorithm {algorithm.name} has no critic",
                    given=str(getattr(critic, name)),
                    allowed=f"{show(info.default)}, or algorithm.name ppo",
                    nearest=show(info.default),
                )
    elif critic.warmup_steps >= run.steps:
        yield Problem(
            ("critic", "warmup_steps"),
            f"the policy would not learn in any of the {run.steps} steps",
            given=str(critic.warmup_steps),
            allowed=f"an integer, at most {run.steps - 1}",
            nearest=str(run.steps - 1),
        )


def _adapters_have_a_base(lora: LoraConfig, model: ModelSettings, mtp: MtpConfig) -> Iterator[Problem]:
    if lora.rank and model.random_weights:
        yield Problem(
            ("model", "random_weights"),
            "adapters adapt a checkpoint: what they are saved without is read from model.path again",
            given="true",
            allowed="false, or lora.rank 0",
            nearest="false",
        )
    if lora.rank and mtp.only and not lora.drafts:
        yield Problem(
            ("mtp", "only"),
            "with adapters nothing else is trained, and the draft layers have none",
            given="true",
            allowed="false, or lora.drafts true, or lora.rank 0",
            nearest="false",
        )
    if lora.rank and lora.drafts and mtp.loss_coefficient == 0:
        yield Problem(
            ("lora", "drafts"),
            "mtp.loss_coefficient is 0: nothing would train the draft layers' adapters",
            given="true",
            allowed="false, or mtp.loss_coefficient above 0",
            nearest="false",
        )


def _teacher_is_there(
    teacher: TeacherConfig, algorithm: AlgorithmConfig, rollout: RolloutConfig
) -> Iterator[Problem]:
    named = teacher.path is not None or bool(teacher.urls)
    if algorithm.algorithm.needs_teacher and not named:
        yield Problem(
            ("teacher", "path"),
            f"algorithm {algorithm.name} learns from a teacher",
            given="null",
            allowed="a checkpoint, or servers in teacher.urls",
        )
    if named and not algorithm.algorithm.needs_teacher:
        yield Problem(
            ("teacher", "path" if teacher.path else "urls"),
            f"algorithm {algorithm.name} has no teacher",
            given=teacher.path or ", ".join(teacher.urls),
            allowed="null" if teacher.path else "[]",
            nearest="null" if teacher.path else "[]",
        )
    if teacher.urls and rollout.temperature != 1:
        yield Problem(
            ("rollout", "temperature"),
            "servers give a teacher's log-probs at temperature 1, and the student's must be the same",
            given=str(rollout.temperature),
            allowed="1, or a teacher in the trainer (teacher.path)",
            nearest="1",
        )


CHECKS: tuple[Check, ...] = (
    *RULES,
    Check(("trainer", "run"), _warmup_fits),
    Check(("algorithm", "rollout", "sft", "trainer"), _batch_can_be_split),
    Check(("algorithm", "rollout"), _group_gives_a_signal),
    Check(("algorithm", "rollout"), _policy_is_sampled),
    Check(("eval", "data"), _evaluation_has_rows),
    Check(("cluster", "parallel"), _ranks_hold_whole_models),
    Check(("cluster", "algorithm"), _only_sampling_can_run_ahead),
    Check(("eval", "algorithm"), _only_samples_are_passed),
    Check(("cluster", "algorithm"), _stale_samples_are_corrected),
    Check(("cluster", "rollout"), _streams_sample_no_more_than_is_trained),
    Check(("rollout", "algorithm"), _partial_rollouts_are_corrected),
    Check(("algorithm", "data"), _documents_are_fine_tuned_on),
    Check(("environment", "data"), _environments_need_conversations),
    Check(("algorithm", "model"), _reference_is_read),
    Check(("algorithm", "trainer"), _on_policy_alone),
    Check(("algorithm", "rollout"), _groups_are_filtered),
    Check(("reward", "rollout"), _overlong_zone_fits),
    Check(("critic", "algorithm", "run"), _critic_is_trained),
    Check(("lora", "model", "mtp"), _adapters_have_a_base),
    Check(("teacher", "algorithm", "rollout"), _teacher_is_there),
)
