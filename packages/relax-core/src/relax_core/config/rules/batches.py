"""Rules of batches, rows and the ranks that they are spread over."""

from collections.abc import Iterator

from relax_core.algorithms.config import AlgorithmConfig
from relax_core.cluster.config import ClusterConfig
from relax_core.config.problems import Problem
from relax_core.config.rules.rule import Check
from relax_core.data.config import DataConfig
from relax_core.device.parallel import ParallelConfig
from relax_core.loop.config import RolloutConfig, SftConfig
from relax_core.trainer.config import TrainerConfig


def _the_budget_holds_the_longest_sample(
    algorithm: AlgorithmConfig, data: DataConfig, rollout: RolloutConfig, trainer: TrainerConfig
) -> Iterator[Problem]:
    """A longer sample would go alone, and memory would have no bound that the settings name."""
    setting, bound = data.longest
    longest = bound or 0
    made_of = f"data.{setting} {longest}"
    if algorithm.algorithm.loop == "rl":
        longest += rollout.max_new_tokens
        made_of += f" and rollout.max_new_tokens {rollout.max_new_tokens}"
    if longest > trainer.micro_batch_tokens:
        yield Problem(
            ("trainer", "micro_batch_tokens"),
            f"a sample may have {longest} tokens ({made_of}), more than a micro-batch is to hold",
            given=str(trainer.micro_batch_tokens),
            allowed=f"an integer, at least {longest}",
            nearest=str(longest),
        )


def _every_replica_has_samples(
    algorithm: AlgorithmConfig,
    rollout: RolloutConfig,
    sft: SftConfig,
    trainer: TrainerConfig,
    cluster: ClusterConfig,
    parallel: ParallelConfig,
) -> Iterator[Problem]:
    """A data-parallel replica without a sample computes padding."""
    rl = algorithm.algorithm.loop == "rl"
    samples = rollout.prompts_per_step * rollout.samples_per_prompt if rl else sft.samples_per_step
    each = samples // trainer.optimizer_steps_per_batch
    replicas = max(1, cluster.trainer_ranks // parallel.model_size)
    if each < replicas:
        yield Problem(
            ("cluster", "trainer_ranks"),
            f"{replicas} replicas of the model share the {each} samples of an optimizer step: some would "
            "have none",
            given=str(cluster.trainer_ranks),
            allowed=f"at most {max(1, each) * parallel.model_size}, or a larger batch",
            nearest=str(max(1, each) * parallel.model_size),
        )


def _rows_are_longer_than_their_padding(
    trainer: TrainerConfig, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Rows are padded to what context- and tensor-parallel ranks divide them by."""
    if trainer.micro_batch_tokens < parallel.row_multiple:
        yield Problem(
            ("trainer", "micro_batch_tokens"),
            f"rows are padded to a multiple of {parallel.row_multiple} (2 x context {parallel.context} x "
            f"tensor {parallel.tensor}): a row would be padding for the most part",
            given=str(trainer.micro_batch_tokens),
            allowed=f"an integer, at least {parallel.row_multiple}",
            nearest=str(parallel.row_multiple),
        )


def _overlap_has_ranks(
    trainer: TrainerConfig, cluster: ClusterConfig, parallel: ParallelConfig
) -> Iterator[Problem]:
    """With one replica on one context-parallel rank there is nothing to sum."""
    sharing = cluster.trainer_ranks // (parallel.tensor * parallel.pipeline)
    if trainer.overlap_grad_reduce and sharing <= 1:
        yield Problem(
            ("trainer", "overlap_grad_reduce"),
            "no ranks share a gradient: there is nothing to sum while the backward pass runs",
            given="true",
            allowed="false, or more cluster.trainer_ranks",
            nearest="false",
        )


def _experts_spread_over_a_stage(cluster: ClusterConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """The ranks of a pipeline stage are divided by those that hold a copy of the experts."""
    shares = parallel.expert_tensor or parallel.tensor
    stage = cluster.trainer_ranks // parallel.pipeline
    copy = parallel.expert * shares
    # Ranks that make no whole replica are another problem, which would come with this one.
    if stage % (parallel.tensor * parallel.context) or stage % copy == 0:
        return
    # With the experts of a stage in one place, only their own tensor size can be wrong.
    name, given, rest = (
        ("expert", parallel.expert, shares) if parallel.expert > 1 else ("expert_tensor", shares, 1)
    )
    fitting = [size for size in range(1, stage + 1) if stage % (size * rest) == 0]
    yield Problem(
        ("parallel", name),
        f"a pipeline stage has {stage} ranks, which do not divide by expert {parallel.expert} x "
        f"expert_tensor {shares} = {copy}",
        given=str(given),
        allowed=", ".join(map(str, fitting)) or f"none with expert_tensor {shares}",
        nearest=str(min(fitting, key=lambda size: abs(size - given)))
        if fitting
        else "1 --parallel.expert_tensor null",
    )


_MOST_SAMPLES = 131_072


def _a_step_has_a_bounded_number_of_samples(rollout: RolloutConfig) -> Iterator[Problem]:
    """The samples of a step lie in memory together, and their micro-batches are planned together."""
    count = rollout.prompts_per_step * rollout.samples_per_prompt
    if count > _MOST_SAMPLES:
        most = _MOST_SAMPLES // rollout.samples_per_prompt
        yield Problem(
            ("rollout", "prompts_per_step"),
            f"with {rollout.samples_per_prompt} completions each a step has {count} samples, which are kept "
            f"and planned together: {_MOST_SAMPLES} at most",
            given=str(rollout.prompts_per_step),
            allowed=f"an integer, at most {most}",
            nearest=str(most),
        )


RULES = (
    Check(("rollout",), _a_step_has_a_bounded_number_of_samples),
    Check(("algorithm", "data", "rollout", "trainer"), _the_budget_holds_the_longest_sample),
    Check(("algorithm", "rollout", "sft", "trainer", "cluster", "parallel"), _every_replica_has_samples),
    Check(("trainer", "parallel"), _rows_are_longer_than_their_padding),
    Check(("trainer", "cluster", "parallel"), _overlap_has_ranks),
    Check(("cluster", "parallel"), _experts_spread_over_a_stage),
)
