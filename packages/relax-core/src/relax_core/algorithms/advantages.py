"""From the scores of completions to advantages.

Axes: N completions, T tokens of all completions back to back, G groups.
"""

from typing import TYPE_CHECKING, Literal

from relax_core.algorithms.algorithm import Completions
from relax_core.algorithms.kl import kl_estimate

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.algorithms.config import AlgorithmConfig


def group_advantages(
    score_N: "Tensor",
    group_id_N: "Tensor",
    *,
    kind: Literal["group_std", "group_centred", "leave_one_out"] = "group_std",
    eps: float = 1e-6,
) -> "Tensor":
    """How much better each completion scored than the completions of the same prompt.

    `group_std` is (x - mean) / (std + eps), from DeepSeekMath (arXiv 2402.03300, section 4.1.2), with the
    sample standard deviation (n - 1). `group_centred` is x - mean, from Dr. GRPO (arXiv 2503.20783,
    section 3.2). `leave_one_out` is x - mean of the others = (x - mean) n / (n - 1), from RLOO (Kool et al.
    2019; Ahmadian et al. 2024, arXiv 2402.14740). Scores of different groups never touch, in
    whatever order the completions come. In a group of one, and in a group whose scores are all equal, every
    advantage is exactly 0.

    Args:
        score_N: [N] float, finite.
        group_id_N: [N] integer; equal ids form a group.
        kind: which of them.
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
    if not bool(score_N.isfinite().all()):
        bad = (~score_N.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"the scores of completions {bad[:5]} are not finite: correct the reward function")
    x_N = score_N.double()
    groups, group_N = group_id_N.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    zero_G = x_N.new_zeros(groups.numel())
    count_G = zero_G.index_add(0, group_N, x_N.new_ones(x_N.shape))
    mean_G = zero_G.index_add(0, group_N, x_N) / count_G
    low_G = zero_G.scatter_reduce(0, group_N, x_N, "amin", include_self=False)
    high_G = zero_G.scatter_reduce(0, group_N, x_N, "amax", include_self=False)
    centred_N = (x_N - mean_G[group_N]).masked_fill((low_G == high_G)[group_N], 0.0)
    if kind == "group_std":
        variance_G = zero_G.index_add(0, group_N, centred_N.square()) / (count_G - 1).clamp(min=1)
        centred_N = centred_N / (variance_G.sqrt()[group_N] + eps)
    elif kind == "leave_one_out":
        centred_N = centred_N * (count_G / (count_G - 1).clamp(min=1))[group_N]
    return centred_N.to(score_N.dtype)


def token_kl(done: Completions, cfg: "AlgorithmConfig") -> "Tensor":
    """KL of the policy before the batch from the reference, at each token [T]; `cfg` names the estimator."""
    return kl_estimate(cfg.kl_estimator, done.columns["old_logprob"], done.columns["ref_logprob"])


def penalised_scores(done: Completions, cfg: "AlgorithmConfig") -> "Tensor":
    """[N]: scores minus kl_reward_coef times the KL summed over each completion.

    The reward-side KL of Ouyang et al. 2022 (arXiv 2203.02155, equation 2), before advantages are taken.
    """
    if cfg.kl_reward_coef == 0:
        return done.score_N
    kl_N = done.score_N.new_zeros(done.score_N.shape).index_add(0, done.sequence_T, token_kl(done, cfg))
    return done.score_N - cfg.kl_reward_coef * kl_N


def whitened(value_T: "Tensor", eps: float = 1e-8) -> "Tensor":
    """(x - mean) / sqrt(variance + eps) over all T; the variance is that of the sample (n - 1)."""
    centred_T = value_T - value_T.mean()
    variance = centred_T.square().sum() / max(1, value_T.numel() - 1)
    return centred_T / (variance + eps).sqrt()


def token_rewards(done: Completions, cfg: "AlgorithmConfig") -> "Tensor":
    """[T]: each completion's score at its last token, minus kl_reward_coef times the KL at every token.

    The rewards of a token-level decision process, from Ouyang et al. 2022 (arXiv 2203.02155, equation 2) and
    REINFORCE++ (arXiv 2501.03262). A completion without tokens gives none.
    """
    reward_T = done.score_N.new_zeros(len(done.sequence_T))
    if cfg.kl_reward_coef:
        reward_T = reward_T - cfg.kl_reward_coef * token_kl(done, cfg)
    last_N = done.sequence_T.bincount(minlength=len(done.score_N)).cumsum(0) - 1
    here_N = done.sequence_T.bincount(minlength=len(done.score_N)) > 0
    return reward_T.index_add(0, last_N[here_N], done.score_N[here_N])


def generalised_advantages(
    reward_T: "Tensor", value_T: "Tensor", sequence_T: "Tensor", *, gamma: float, lam: float
) -> "Tensor":
    """Generalised advantage estimation: A_t = delta_t + gamma lambda A_(t+1), 0 behind the last token, with
    delta_t = r_t + gamma V_(t+1) - V_t and V = 0 behind the last token.

    Schulman et al. 2015, arXiv 1506.02438, equations 11 to 16. With V = 0 and lambda = 1 it is the discounted
    sum of the rewards from t on.

    Args:
        reward_T: [T] float.
        value_T: [T] float, of the state in which each token is drawn.
        sequence_T: int64 [T], completion of each token, in order.
        gamma: discount, 0 to 1.
        lam: weight of longer estimates, 0 to 1.

    Returns:
        [T].
    """
    if not len(sequence_T):
        return reward_T
    count_N = sequence_T.bincount()
    start_N = count_N.cumsum(0) - count_N
    place_T = sequence_T.new_ones(sequence_T.shape).cumsum(0) - 1 - start_N[sequence_T]
    zero_NL = reward_T.new_zeros(len(count_N), int(count_N.max()) + 1)
    reward_NL = zero_NL.index_put((sequence_T, place_T), reward_T)
    value_NL = zero_NL.index_put((sequence_T, place_T), value_T)
    advantage_NL = zero_NL.clone()
    for t in reversed(range(zero_NL.shape[1] - 1)):
        delta_N = reward_NL[:, t] + gamma * value_NL[:, t + 1] - value_NL[:, t]
        advantage_NL[:, t] = delta_N + gamma * lam * advantage_NL[:, t + 1]
    return advantage_NL[sequence_T, place_T]
