"""SAPO: a soft gate in place of the clip.

Axes: T tokens.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.algorithms.algorithm import PolicyTokens
from relax_core.algorithms.builtin.grpo import GRPO
from relax_core.algorithms.clipping import Clipped, unclipped
from relax_core.algorithms.ratio import bounded_ratio

if TYPE_CHECKING:
    from relax_core.algorithms.config import AlgorithmConfig


def soft_gate_loss(tokens: PolicyTokens, cfg: "AlgorithmConfig") -> Clipped:
    """-f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)); tau is gate_positive where A > 0, else gate_negative.

    Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv 2511.20347. f has slope 1 at r = 1
    and flattens to both sides.
    """
    temperature_T = tokens.advantage_T.new_full(tokens.advantage_T.shape, cfg.gate_negative)
    temperature_T = temperature_T.masked_fill(tokens.advantage_T > 0, cfg.gate_positive)
    ratio_T = bounded_ratio(tokens.log_ratio_T)
    gate_T = 4 / temperature_T * (temperature_T * (ratio_T - 1)).sigmoid()
    return unclipped(-gate_T * tokens.advantage_T)


SAPO = replace(
    GRPO,
    name="sapo",
    summary="GRPO with a soft gate in place of the clip, steeper where the advantage is negative.",
    source="Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv 2511.20347",
    objective="-(4 / tau) sigmoid(tau (r - 1)) A, tau = gate_positive if A > 0 else gate_negative",
    policy_loss=soft_gate_loss,
    settings=GRPO.settings - {"clip_low", "clip_high", "dual_clip"} | {"gate_positive", "gate_negative"},
)
