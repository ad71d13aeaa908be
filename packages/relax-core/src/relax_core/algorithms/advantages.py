"""Advantages of completions relative to their group.

Axes: N completions, T packed tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from relax_core.algorithms.kinds import Advantage


def group_advantages(
    score_N: Tensor, group_id_N: Tensor, *, kind: Advantage = "group_std", eps: float = 1e-6
) -> Tensor:
    """How much better each completion scored than the completions of the same prompt.

    `group_std` is (x - mean) / (std + eps), from DeepSeekMath (arXiv 2402.03300, section 4.1.2), with the
    sample standard deviation (n - 1). `group_centred` is x - mean, from Dr. GRPO (arXiv 2503.20783,
    section 3.2). Scores of different groups never touch, in whatever order the completions come. In a group
    of one, and in a group whose scores are all equal, every advantage is exactly 0.

    Args:
        score_N: [N] float, finite.
        group_id_N: [N] integer; equal ids form a group.
        kind: with or without division by the std of the group.
        eps: added to the std.

    Returns:
        [N] of score_N's dtype; computed in float64.

    Raises:
        ValueError: shapes differ or a score is not finite.
    """
    if score_N.ndim != 1 or score_N.shape != group_id_N.shape:
        raise ValueError(
            f"scores {tuple(score_N.shape)} and group ids {tuple(group_id_N.shape)} must be two vectors "
            "of one length"
        )
    if not bool(torch.isfinite(score_N).all()):
        bad = torch.nonzero(~torch.isfinite(score_N)).flatten().tolist()
        raise ValueError(f"the scores of completions {bad[:5]} are not finite: correct the reward function")
    x_N = score_N.double()
    groups, group_N = torch.unique(group_id_N, return_inverse=True)
    zero_G = x_N.new_zeros(groups.numel())
    count_G = zero_G.index_add(0, group_N, torch.ones_like(x_N))
    mean_G = zero_G.index_add(0, group_N, x_N) / count_G
    low_G = zero_G.scatter_reduce(0, group_N, x_N, "amin", include_self=False)
    high_G = zero_G.scatter_reduce(0, group_N, x_N, "amax", include_self=False)
    centred_N = torch.where((low_G == high_G)[group_N], x_N.new_zeros(()), x_N - mean_G[group_N])
    if kind == "group_std":
        variance_G = zero_G.index_add(0, group_N, centred_N.square()) / (count_G - 1).clamp(min=1)
        centred_N = centred_N / (variance_G.sqrt()[group_N] + eps)
    return centred_N.to(score_N.dtype)


def penalised_scores(
    score_N: Tensor, kl_T: Tensor, mask_T: Tensor, lengths: Sequence[int], coef: float
) -> Tensor:
    """Scores minus `coef` times the KL summed over each completion's own tokens.

    The reward-side KL of Ouyang et al. 2022 (arXiv 2203.02155, equation 2), before advantages are taken.

    Args:
        score_N: [N] float.
        kl_T: [T] float, estimate per token; see `kl_estimate`.
        mask_T: [T] bool, the completion's tokens; other positions are never read.
        lengths: positions of each of the N sequences; their sum is T.
        coef: weight of the KL.

    Returns:
        [N] of score_N's dtype.
    """
    if sum(lengths) != kl_T.numel() or len(lengths) != score_N.numel():
        raise ValueError(
            f"{len(lengths)} sequences of {sum(lengths)} positions do not fit {score_N.numel()} scores "
            f"and {kl_T.numel()} positions"
        )
    sequence_T = torch.repeat_interleave(torch.tensor(list(lengths), device=kl_T.device))
    kept_T = torch.where(mask_T.bool(), kl_T.double(), kl_T.new_zeros((), dtype=torch.float64))
    kl_N = kept_T.new_zeros(len(lengths)).index_add(0, sequence_T, kept_T)
    return (score_N.double() - coef * kl_N.to(score_N.device)).to(score_N.dtype)
