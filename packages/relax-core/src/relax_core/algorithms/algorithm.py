"""`Algorithm`: what one algorithm is, needs and may be combined with.

Axes: N completions, T tokens. Nothing here imports torch, so that the settings read quickly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from relax_core.algorithms.kinds import KlEstimator, Reduction

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.algorithms.clipping import Clipped
    from relax_core.algorithms.config import AlgorithmConfig
    from relax_core.algorithms.sequences import Sequences

CORRECTION_SETTINGS = frozenset({"correction", "correction_level", "correction_low", "correction_high"})
"""Fields of `AlgorithmConfig` that weigh tokens by trainer over engine."""

POLICY_SETTINGS = CORRECTION_SETTINGS | {
    "reduction",
    "fixed_length",
    "mask_truncated",
    "clip_low",
    "clip_high",
    "kl",
    "kl_loss_coef",
    "kl_reward_coef",
    "entropy_coef",
}
"""Fields of `AlgorithmConfig` that every clipped policy gradient reads."""


@dataclass(frozen=True)
class Completions:
    """Sampled completions of a batch, from which advantages are made; on the host, float64.

    Attributes:
        score_N: [N], the rewards.
        group_N: int64 [N]; completions of one prompt share it.
        sequence_T: int64 [T], the completion that each token belongs to, 0 to N - 1 in order.
        columns: [T] of each token: rollout_logprob, and what the algorithm needs of old_logprob,
            ref_logprob, teacher_logprob and value.
    """

    score_N: "Tensor"
    group_N: "Tensor"
    sequence_T: "Tensor"
    columns: "Mapping[str, Tensor]" = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens of a micro-batch, as a policy loss reads them; all of them count.

    Attributes:
        logprob_T: [T] float, under the weights being trained, with gradient.
        old_logprob_T: [T] float, before the first optimizer step of the batch, or by the engine where the
            algorithm compares with that.
        advantage_T: [T] float.
        sequences: sums over whole completions.
        columns: [T] float by name, further values of each token.
    """

    logprob_T: "Tensor"
    old_logprob_T: "Tensor"
    advantage_T: "Tensor"
    sequences: "Sequences"
    columns: "Mapping[str, Tensor]" = field(default_factory=dict)

    @property
    def log_ratio_T(self) -> "Tensor":
        """Log of the policy ratio [T], with gradient."""
        return self.logprob_T - self.old_logprob_T


@dataclass(frozen=True)
class Algorithm:
    """What one algorithm is and needs. Validation reads it, so that an algorithm brings its own refusals.

    Attributes:
        name: value of `algorithm.name`.
        summary: one sentence for people.
        source: the papers the formulas are from, with equations.
        objective: what is minimised, as text; for the docs.
        advantage_formula: how scores become advantages, as text.
        loop: "rl" samples completions and scores them, "sft" trains on given ones, "pairs" on a better and a
            worse one.
        level: whether the policy ratio is one token's or one whole completion's.
        advantage: gives [T] advantages; None if the algorithm has none.
        policy_loss: gives the loss of each token; None if the algorithm has no policy ratio.
        value_target: gives [T] what the critic should have said; None without a critic.
        batch_columns: gives further columns [T] of the tokens of a whole mini-batch, from those they have,
            before its loss; float64, with `needs_scores` on the device, whose numbers are not to be read.
        min_group_size: fewest completions per prompt that give a signal.
        default_reduction: reduction taken when the user names none.
        reductions: every reduction that makes sense.
        settings: names of the fields of `AlgorithmConfig` that have an effect.
        clip: distances below and above 1 taken when the user names none.
        default_kl: estimator taken when the user names none.
        ratio_to: whether the old log-probs are the trainer's or the engine's.
        needs_reference: a frozen reference policy, whatever the coefficients.
        needs_teacher: a teacher's log-probs.
        needs_critic: a value of every token, from a critic that is trained beside the policy.
        needs_scores: the present log-probs of a whole mini-batch before its loss: one more forward pass.
        needs_dynamic_sampling: groups whose rewards are all equal must be dropped.
        on_policy: each batch is good for one optimizer step.
    """

    name: str
    summary: str
    source: str
    objective: str
    loop: Literal["rl", "sft", "pairs"]
    default_reduction: Reduction
    reductions: frozenset[Reduction]
    settings: frozenset[str]
    advantage: "Callable[[Completions, AlgorithmConfig], Tensor] | None" = None
    policy_loss: "Callable[[PolicyTokens, AlgorithmConfig], Clipped] | None" = None
    value_target: "Callable[[Completions, AlgorithmConfig], Tensor] | None" = None
    batch_columns: "Callable[[Mapping[str, Tensor], AlgorithmConfig], Mapping[str, Tensor]] | None" = None
    advantage_formula: str = ""
    level: Literal["token", "sequence"] = "token"
    min_group_size: int = 1
    clip: tuple[float, float] = (0.2, 0.28)
    default_kl: KlEstimator = "low_var"
    ratio_to: Literal["trainer", "rollout"] = "trainer"
    needs_reference: bool = False
    needs_teacher: bool = False
    needs_critic: bool = False
    needs_scores: bool = False
    needs_dynamic_sampling: bool = False
    on_policy: bool = False

    def __post_init__(self) -> None:
        if self.default_reduction not in self.reductions:
            raise ValueError(
                f"algorithm {self.name!r}: its default reduction {self.default_reduction!r} is not among "
                f"its reductions {sorted(self.reductions)}"
            )
        if self.needs_critic != (self.value_target is not None):
            raise ValueError(f"algorithm {self.name!r}: needs_critic goes with a value_target, and only then")
        unread = [name for name in ("advantage", "policy_loss", "batch_columns") if getattr(self, name)]
        if self.loop != "rl" and unread:
            raise ValueError(
                f"algorithm {self.name!r} learns from given texts (loop {self.loop!r}), where nothing reads "
                f"its {' and '.join(unread)}: leave them out, or sample completions (loop 'rl')"
            )
        if self.loop == "rl" and (self.advantage is None or self.policy_loss is None):
            raise ValueError(
                f"algorithm {self.name!r} samples completions: give it an advantage and a policy_loss"
            )
