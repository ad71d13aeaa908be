"""What held-out prompts say of the policy: accuracy, reward and pass@k, for each set."""

from collections.abc import Sequence
from math import comb
from statistics import fmean

from relax_core.loop.groups import Group


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that one of `k` samples is correct, estimated without bias from `samples` of them.

    1 - C(n - c, k) / C(n, k), Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    arXiv 2107.03374, equation 1.

    Args:
        samples: n, drawn independently.
        correct: c of them.
        k: at most n.

    Raises:
        ValueError: numbers that cannot be.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} of {correct} correct among {samples} samples: k must be from 1 to the number of "
            "samples"
        )
    return 1 - comb(samples - correct, k) / comb(samples, k)


def evaluation_metrics(groups: Sequence[Group], pass_at: Sequence[int]) -> dict[str, float]:
    """Metrics of one set.

    Returns:
        `reward`; `accuracy` over completions, where the reward judges whether an answer is correct; and then
        `pass_at_<k>` over prompts. A completion that could not be judged counts as wrong.
    """
    members = [member for group in groups for member in group.members]
    metrics = {"reward": fmean(member.result.score for member in members)}
    judged = [float(m.result.correct) for m in members if m.result.correct is not None]
    if not judged:
        return metrics
    metrics["accuracy"] = fmean(judged)
    for k in pass_at:
        metrics[f"pass_at_{k}"] = fmean(
            pass_at_k(len(group.members), sum(bool(m.result.correct) for m in group.members), k)
            for group in groups
        )
    return metrics
