"""Settings of the algorithm, and the refusal of combinations that cannot work."""

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import WithJsonSchema, field_validator, model_validator

from relax_core.algorithms.algorithm import Algorithm
from relax_core.algorithms.kinds import Correction, CorrectionLevel, KlEstimator, Reduction
from relax_core.algorithms.registry import algorithm_names, get_algorithm
from relax_core.config.section import Section, SettingError, refuse, setting

_TRUNCATED_CAP = 2.0
_ICEPOP_BAND = (0.5, 5.0)


class AlgorithmConfig(Section):
    """Which algorithm trains the policy, and with which coefficients."""

    name: Annotated[str, WithJsonSchema({"type": "string", "enum": list(algorithm_names())})] = setting(
        "grpo", "Algorithm that trains the policy, or your own as module:name."
    )
    reduction: Reduction | None = setting(
        None,
        "How per-token losses become one: mean over all tokens (token_mean), over sequences of their token "
        "means (sequence_mean), over groups of their token means (group_mean), over sequences of their token "
        "sums (sequence_sum), or the sum over tokens divided by sequences times fixed_length (fixed_length); "
        "null takes the algorithm's own.",
    )
    fixed_length: int | None = setting(
        None,
        "Divisor of the fixed_length reduction; null takes rollout.max_new_tokens.",
        unit="tokens",
        ge=1,
    )
    mask_truncated: bool = setting(
        False,
        "Completions that were cut carry no loss; their scores still count in their groups (DAPO's overlong "
        "filtering).",
    )
    advantage_eps: float = setting(
        1e-6, "Added to the std of a group's scores before dividing by it.", gt=0, allow_inf_nan=False
    )
    clip_low: float | None = setting(
        None,
        "The policy ratio is clipped below 1 - clip_low where the advantage is negative; null takes the "
        "algorithm's own, 0.2 for most.",
        gt=0,
        le=1,
    )
    clip_high: float | None = setting(
        None,
        "The policy ratio is clipped above 1 + clip_high where the advantage is positive; null takes the "
        "algorithm's own, 0.28 for most.",
        gt=0,
        le=1e9,
    )
    dual_clip: float | None = setting(
        None,
        "Bound on the ratio where the advantage is negative, for instance 3; null is off.",
        gt=1,
        allow_inf_nan=False,
    )
    gate_positive: float = setting(
        1.0, "Steepness of SAPO's gate where the advantage is positive.", gt=0, le=1e3
    )
    gate_negative: float = setting(
        1.05, "Steepness of SAPO's gate where the advantage is not positive.", gt=0, le=1e3
    )
    second_moment_limit: float = setting(
        0.04,
        "Bound of M2PO on the mean of (log-ratio)^2 over the tokens of a mini-batch that move away from the "
        "policy that sampled them.",
        gt=0,
    )
    preference_beta: float = setting(
        0.1, "How strongly DPO's reference holds: factor of the log-ratios in its margin.", gt=0
    )
    gae_gamma: float = setting(1.0, "Discount of later rewards in advantages (ppo).", ge=0, le=1)
    gae_lambda: float = setting(
        1.0, "Weight of longer estimates of an advantage; 1 relies on the critic least (ppo).", ge=0, le=1
    )
    whiten_advantages: bool = setting(
        True, "Centres advantages over the batch's tokens and divides them by their std (ppo)."
    )
    value_clip: float | None = setting(
        0.2, "How far a value counts that moved within one batch; null is off (ppo).", gt=0
    )
    kl: KlEstimator | None = setting(
        None,
        "Estimator of KL(policy || reference); null takes the algorithm's own, low_var for most. k1 is for "
        "rewards: as a loss its gradient has mean zero.",
    )
    kl_loss_coef: float = setting(0.0, "Weight of the KL as a loss term.", ge=0, allow_inf_nan=False)
    kl_reward_coef: float = setting(
        0.0,
        "Weight of the KL, summed over a completion, subtracted from its score.",
        ge=0,
        allow_inf_nan=False,
    )
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus.", ge=0, allow_inf_nan=False)
    correction: Correction = setting(
        "truncated",
        "Importance weight exp(trainer - rollout log-prob) on the policy loss: none, capped (truncated), or "
        "set to 0 outside of a band (icepop).",
    )
    correction_level: CorrectionLevel | None = setting(
        None,
        "Whose probability the importance weight compares: each token's, the whole completion's (sequence), "
        "or the geometric mean over its tokens (geometric); null takes token, or geometric where the "
        "algorithm's ratio is a whole completion's.",
    )
    correction_low: float | None = setting(None, "Lower end of IcePop's band; null takes 0.5.", ge=0, lt=1)
    correction_high: float | None = setting(
        None,
        "Cap of the truncated weight (null takes 2), or upper end of IcePop's band (null takes 5).",
        ge=1,
        allow_inf_nan=False,
    )

    @property
    def algorithm(self) -> Algorithm:
        """The declaration of the algorithm."""
        return get_algorithm(self.name)

    @property
    def token_reduction(self) -> Reduction:
        """The reduction in use: the one set, or the algorithm's own."""
        return self.reduction or self.algorithm.default_reduction

    @property
    def clip_range(self) -> tuple[float, float]:
        """Distances below and above 1 in use: those set, or the algorithm's own."""
        low, high = self.algorithm.clip
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def kl_estimator(self) -> KlEstimator:
        """The estimator in use: the one set, or the algorithm's own."""
        return self.kl or self.algorithm.default_kl

    @property
    def correction_in_use(self) -> Correction:
        """The correction, none where the algorithm has no place for one."""
        return self.correction if "correction" in self.algorithm.settings else "none"

    @property
    def correction_level_in_use(self) -> CorrectionLevel:
        """The level in use: the one set, or that of the algorithm's ratio."""
        return self.correction_level or ("token" if self.algorithm.level == "token" else "geometric")

    @property
    def correction_band(self) -> tuple[float, float]:
        """(lower, upper) end of the importance weight in use; (0, inf) without a correction."""
        if self.correction_in_use == "none":
            return 0.0, float("inf")
        if self.correction_in_use == "truncated":
            return 0.0, _TRUNCATED_CAP if self.correction_high is None else self.correction_high
        low, high = _ICEPOP_BAND
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def corrects_stale_tokens(self) -> bool:
        """Whether tokens that older weights drew are weighed as such."""
        return self.algorithm.ratio_to == "rollout" or self.correction_in_use != "none"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a frozen reference model are needed."""
        return self.algorithm.needs_reference or self.kl_loss_coef > 0 or self.kl_reward_coef > 0

    def needs_old_logprob(self, optimizer_steps: int) -> bool:
        """Whether the policy scores a batch before it learns from it in so many optimizer steps."""
        if self.kl_reward_coef > 0 or self.algorithm.needs_teacher:
            return True
        return optimizer_steps > 1 and self.algorithm.ratio_to == "trainer"

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        get_algorithm(name)
        return name

    @model_validator(mode="after")
    def _combination_is_possible(self) -> Self:
        refuse([*self._unused_settings(), *self._contradictions()])
        return self

    def _wrong(self, field: str, message: str, *, allowed: str, nearest: Any) -> SettingError:
        return SettingError(field, message, given=getattr(self, field), allowed=allowed, nearest=nearest)

    def _unused_settings(self) -> list[SettingError]:
        used = self.algorithm.settings | {"name"}
        return [
            self._wrong(
                field,
                f"{field} {getattr(self, field)!r} has no effect with algorithm {self.name!r}: "
                f"leave it at its default {info.default!r}",
                allowed=f"its default {info.default!r}",
                nearest=info.default,
            )
            for field, info in type(self).model_fields.items()
            if field not in used and getattr(self, field) != info.default
        ]

    def _contradictions(self) -> Iterator[SettingError]:
        if self.token_reduction not in self.algorithm.reductions:
            yield self._wrong(
                "reduction",
                f"reduction {self.token_reduction!r} does not fit algorithm {self.name!r}: "
                f"allowed are {', '.join(sorted(self.algorithm.reductions))}",
                allowed=", ".join(sorted(self.algorithm.reductions)),
                nearest=type(self).model_fields["reduction"].default,
            )
        if self.fixed_length is not None and self.token_reduction != "fixed_length":
            yield self._wrong(
                "fixed_length",
                f"fixed_length {self.fixed_length} has no effect with reduction {self.token_reduction!r}: "
                "leave it null or set reduction to fixed_length",
                allowed="null, or reduction fixed_length",
                nearest=None,
            )
        if self.kl_loss_coef > 0 and self.kl_reward_coef > 0:
            yield self._wrong(
                "kl_loss_coef",
                f"kl_loss_coef {self.kl_loss_coef:g} and kl_reward_coef {self.kl_reward_coef:g} would count "
                "the KL twice: set one of them to 0",
                allowed="0, or kl_reward_coef 0",
                nearest=0.0,
            )
        if self.kl_loss_coef > 0 and self.kl_estimator == "k1":
            yield self._wrong(
                "kl",
                f"kl_loss_coef {self.kl_loss_coef:g} with estimator k1 has a gradient of mean zero and holds "
                "the policy nowhere: set kl to k2, k3 or low_var, or use kl_reward_coef",
                allowed="k2, k3 or low_var, or kl_loss_coef 0",
                nearest="low_var",
            )
        if self.correction_low is not None and self.correction != "icepop":
            yield self._wrong(
                "correction_low",
                f"correction_low {self.correction_low:g} has no effect with correction {self.correction!r}: "
                "leave it null or set correction to icepop",
                allowed="null, or correction icepop",
                nearest=None,
            )
        if self.correction_level is not None and self.correction == "none":
            yield self._wrong(
                "correction_level",
                f"correction_level {self.correction_level} has no effect with correction 'none': leave it at "
                "null or set correction to truncated or icepop",
                allowed="null, or correction truncated or icepop",
                nearest=None,
            )
        if self.correction_high is not None and self.correction == "none":
            yield self._wrong(
                "correction_high",
                f"correction_high {self.correction_high:g} has no effect with correction 'none': "
                "leave it null or set correction to truncated or icepop",
                allowed="null, or correction truncated or icepop",
                nearest=None,
            )
