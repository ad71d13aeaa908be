"""The algorithms by name, each with what it needs and what it may be combined with.

Validation reads these declarations, so that a new algorithm brings its own refusals with it.
"""

from dataclasses import dataclass
from typing import Literal

from relax_core.algorithms.kinds import Advantage, Reduction

_POLICY_SETTINGS = frozenset(
    {
        "reduction",
        "fixed_length",
        "advantage_eps",
        "clip_low",
        "clip_high",
        "dual_clip",
        "kl",
        "kl_loss_coef",
        "kl_reward_coef",
        "entropy_coef",
        "correction",
        "correction_low",
        "correction_high",
    }
)


@dataclass(frozen=True)
class Algorithm:
    """What one algorithm is and needs.

    Attributes:
        name: value of `algorithm.name`.
        summary: one sentence for people.
        source: the paper the formulas are from.
        loop: "rl" samples completions and scores them, "sft" trains on given ones.
        advantage: how scores become advantages; None if the algorithm has none.
        min_group_size: fewest completions per prompt that give a signal.
        default_reduction: reduction taken when the user names none.
        reductions: every reduction that makes sense.
        settings: names of the fields of `AlgorithmConfig` that have an effect.
    """

    name: str
    summary: str
    source: str
    loop: Literal["rl", "sft"]
    advantage: Advantage | None
    min_group_size: int
    default_reduction: Reduction
    reductions: frozenset[Reduction]
    settings: frozenset[str]

    def __post_init__(self) -> None:
        if self.default_reduction not in self.reductions:
            raise ValueError(
                f"algorithm {self.name!r}: its default reduction {self.default_reduction!r} is not among "
                f"its reductions {sorted(self.reductions)}"
            )


_REGISTRY: dict[str, Algorithm] = {}


def register_algorithm(algorithm: Algorithm) -> None:
    """Makes an algorithm known by its name.

    Raises:
        ValueError: another algorithm has the name.
    """
    if algorithm.name in _REGISTRY:
        raise ValueError(f"algorithm {algorithm.name!r} is registered already: choose another name")
    _REGISTRY[algorithm.name] = algorithm


def algorithm_names() -> tuple[str, ...]:
    """Names of all known algorithms, sorted."""
    return tuple(sorted(_REGISTRY))


def get_algorithm(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        ValueError: no algorithm has the name; the known ones are listed.
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown algorithm {name!r}: allowed are {', '.join(algorithm_names())}")
    return _REGISTRY[name]


register_algorithm(
    Algorithm(
        name="grpo",
        summary="Clipped policy gradient on the scores of a group, centred and divided by their std.",
        source="Shao et al. 2024, DeepSeekMath, arXiv 2402.03300",
        loop="rl",
        advantage="group_std",
        min_group_size=2,
        default_reduction="sequence_mean",
        reductions=frozenset({"token_mean", "sequence_mean", "group_mean", "fixed_length"}),
        settings=_POLICY_SETTINGS,
    )
)
register_algorithm(
    Algorithm(
        name="dr_grpo",
        summary="GRPO without its two biases: scores are only centred, and tokens divided by a fixed length.",
        source="Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783",
        loop="rl",
        advantage="group_centred",
        min_group_size=2,
        default_reduction="fixed_length",
        reductions=frozenset({"token_mean", "sequence_mean", "group_mean", "fixed_length"}),
        settings=_POLICY_SETTINGS - {"advantage_eps"},
    )
)
register_algorithm(
    Algorithm(
        name="sft",
        summary="Supervised fine-tuning: the log-likelihood of given assistant tokens.",
        source="maximum likelihood",
        loop="sft",
        advantage=None,
        min_group_size=1,
        default_reduction="token_mean",
        reductions=frozenset({"token_mean", "sequence_mean"}),
        settings=frozenset({"reduction"}),
    )
)
