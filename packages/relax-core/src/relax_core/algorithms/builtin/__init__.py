"""The algorithms that ship with the package: one file each, or one for those that share a formula."""

from relax_core.algorithms.algorithm import Algorithm
from relax_core.algorithms.builtin.cispo import CISPO
from relax_core.algorithms.builtin.distillation import DISTILLATION
from relax_core.algorithms.builtin.dpo import DPO
from relax_core.algorithms.builtin.grpo import DAPO, DR_GRPO, GRPO
from relax_core.algorithms.builtin.gspo import GSPO
from relax_core.algorithms.builtin.m2po import M2PO
from relax_core.algorithms.builtin.ppo import PPO
from relax_core.algorithms.builtin.reinforce import REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE, RLOO
from relax_core.algorithms.builtin.sapo import SAPO
from relax_core.algorithms.builtin.sft import SFT

BUILT_IN: tuple[Algorithm, ...] = (
    GRPO,
    DR_GRPO,
    DAPO,
    GSPO,
    CISPO,
    SAPO,
    RLOO,
    REINFORCE_PLUS_PLUS,
    REINFORCE_PLUS_PLUS_BASELINE,
    M2PO,
    PPO,
    DISTILLATION,
    DPO,
    SFT,
)
