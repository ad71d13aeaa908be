"""On-policy distillation: a teacher judges every token that the student drew.

Axes: T tokens.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.algorithms.algorithm import Completions
from relax_core.algorithms.builtin.grpo import GRPO

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.algorithms.config import AlgorithmConfig


def teacher_advantage(done: Completions, cfg: "AlgorithmConfig") -> "Tensor":
    """[T]: log-prob of the teacher minus that of the student.

    Minus a sample of KL(student || teacher) at each token, on the student's own completions: Agarwal et al.
    2024, On-Policy Distillation of Language Models, arXiv 2306.13649, section 3.1, with the reverse KL; as
    advantages of single tokens, discounted at once, in Lu 2025, "On-Policy Distillation", Thinking Machines.
    """
    return done.columns["teacher_logprob"] - done.columns["old_logprob"]


DISTILLATION = replace(
    GRPO,
    name="on_policy_distillation",
    summary="Draws the student towards a teacher on the student's own completions; rewards are only watched.",
    source="Agarwal et al. 2024, arXiv 2306.13649, section 3.1; Lu 2025, On-Policy Distillation",
    advantage_formula="log pi_teacher - log pi_old of each token",
    advantage=teacher_advantage,
    min_group_size=1,
    default_reduction="token_mean",
    settings=GRPO.settings - {"advantage_eps", "kl_reward_coef", "mask_truncated"},
    needs_teacher=True,
)
