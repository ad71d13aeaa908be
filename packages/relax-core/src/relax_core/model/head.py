"""Log-probabilities of target tokens from hidden states, without keeping logits.

Axes: S scored positions, D hidden, V vocabulary rows of this rank.
"""

from typing import Any, NamedTuple

import torch
from relax_kernels import linear_logprob

_ARGMAX_CHUNK = 4096


class TokenLogProbs(NamedTuple):
    """What the head says about S targets.

    Attributes:
        logprob_T: float32 [S], log-prob of the target; 0 where the target is -1.
        entropy_T: float32 [S] in nats, or None when not asked for.
        argmax_T: int64 [S], the likeliest token, or None when not asked for.
    """

    logprob_T: torch.Tensor
    entropy_T: torch.Tensor | None
    argmax_T: torch.Tensor | None


def score_tokens(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_S: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    with_argmax: bool,
    group: Any,
) -> TokenLogProbs:
    """Log-probs of `target_S` under softmax(hidden @ weight.T / temperature); see
    `relax_kernels.linear_logprob`.

    Args:
        hidden_SD: hidden states at the scored positions.
        weight_VD: rows of the output head on this rank.
        target_S: int64 token ids, -1 for none.
        temperature: divides the logits.
        with_entropy: also the entropy.
        with_argmax: also the likeliest token.
        group: tensor-parallel process group over which the vocabulary is spread.
    """
    spread = group if group.size() > 1 else None
    scored = linear_logprob(
        hidden_SD,
        weight_VD,
        target_S,
        temperature=temperature,
        with_entropy=with_entropy,
        process_group=spread,
    )
    argmax_S = _argmax(hidden_SD, weight_VD, spread) if with_argmax else None
    return TokenLogProbs(scored.logprob_T, scored.entropy_T, argmax_S)


@torch.no_grad()
def _argmax(hidden_SD: torch.Tensor, weight_VD: torch.Tensor, group: Any) -> torch.Tensor:
    """The likeliest token of each position, over all ranks of `group`."""
    best = [(part_SD @ weight_VD.T).max(dim=-1) for part_SD in torch.split(hidden_SD, _ARGMAX_CHUNK)]
    value_S, index_S = torch.cat([b.values for b in best]), torch.cat([b.indices for b in best])
    if group is None:
        return index_S
    index_S = index_S + group.rank() * weight_VD.shape[0]
    values = [torch.empty_like(value_S) for _ in range(group.size())]
    indices = [torch.empty_like(index_S) for _ in range(group.size())]
    torch.distributed.all_gather(values, value_S, group=group)
    torch.distributed.all_gather(indices, index_S, group=group)
    winner_S = torch.stack(values).argmax(dim=0, keepdim=True)
    return torch.stack(indices).gather(0, winner_S).squeeze(0)
