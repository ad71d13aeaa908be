"""The ``exact_match`` reward."""

from relax_rollout.rewards.results import Reward, RewardInput, RewardResult


def judge(item: RewardInput) -> RewardResult:
    """Score 1 if completion and answer are the same text but for white space at either end, else 0.

    Raises:
        ValueError: the item has no answer.
    """
    if item.answer is None:
        raise ValueError("exact_match needs an answer and the data row has none")
    extracted = item.completion.strip()
    correct = extracted == item.answer.strip()
    return RewardResult(score=float(correct), correct=correct, extracted=extracted)


EXACT_MATCH = Reward(name="exact_match", quick=judge)
