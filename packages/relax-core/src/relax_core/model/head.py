"""Log-probabilities of target tokens from hidden states, without keeping logits.

Axes: S scored positions, D hidden, V vocabulary rows of this rank.
"""

from typing import Any

import torch
from relax_kernels import LogProbs, linear_logprob


def score_tokens(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_S: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    all_targets: bool,
    group: Any,
) -> LogProbs:
    """Log-probs of `target_S` under softmax(hidden @ weight.T / temperature); see
    `relax_kernels.linear_logprob`.

    Args:
        hidden_SD: hidden states at the scored positions.
        weight_VD: rows of the output head on this rank.
        target_S: int64 token ids, -1 for none.
        temperature: divides the logits.
        with_entropy: also the entropy.
        all_targets: no target is -1, which saves a wait for the device.
        group: tensor-parallel process group over which the vocabulary is spread.
    """
    return linear_logprob(
        hidden_SD,
        weight_VD,
        target_S,
        temperature=temperature,
        with_entropy=with_entropy,
        all_targets=all_targets,
        process_group=group if group.size() > 1 else None,
    )
