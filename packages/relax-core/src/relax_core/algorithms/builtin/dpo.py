"""DPO: preferences without sampling.

Axes: P pairs.
"""

from typing import TYPE_CHECKING, NamedTuple

from relax_core.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor


class Preference(NamedTuple):
    """Of each pair [P]: its loss, the loss's slope by the better one's log-prob, and the margin."""

    loss_P: "Tensor"
    slope_P: "Tensor"
    margin_P: "Tensor"


def preference_loss(chosen_P: "Tensor", rejected_P: "Tensor", *, beta: float) -> Preference:
    """-log sigmoid(margin), margin = beta (chosen - rejected).

    Rafailov et al. 2023, Direct Preference Optimization, arXiv 2305.18290, equation 7. The slope by the
    better completion's log-prob is -beta sigmoid(-margin), and the opposite by the worse one's.

    Args:
        chosen_P: [P] float, log pi(y|x) - log pi_ref(y|x) of the better completion.
        rejected_P: [P] float, of the worse one.
        beta: how strongly the reference holds.
    """
    margin_P = beta * (chosen_P - rejected_P)
    loss_P = (-margin_P).clamp(min=0) + (-margin_P.abs()).exp().log1p()
    return Preference(loss_P, -beta * (-margin_P).sigmoid(), margin_P)


DPO = Algorithm(
    name="dpo",
    summary="Learns from pairs of a better and a worse completion, against a frozen reference.",
    source="Rafailov et al. 2023, Direct Preference Optimization, arXiv 2305.18290, equation 7",
    objective="-log sigmoid(preference_beta (log pi/pi_ref of chosen - log pi/pi_ref of rejected))",
    loop="pairs",
    level="sequence",
    default_reduction="sequence_sum",
    reductions=frozenset({"sequence_sum"}),
    settings=frozenset({"preference_beta"}),
    needs_reference=True,
    needs_scores=True,
)
