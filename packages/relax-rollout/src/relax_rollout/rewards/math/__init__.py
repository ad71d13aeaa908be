"""The ``math`` reward: 1 if the completion's final answer equals the reference answer, else 0."""

from relax_rollout.rewards.math.extract import final_answer
from relax_rollout.rewards.math.number import is_parsable, is_unevaluated, read_number, tidy
from relax_rollout.rewards.results import Reward, RewardInput, RewardResult


def quick(item: RewardInput) -> RewardResult | None:
    r"""Judge what needs no algebra: equal text, two numbers, no answer, text that no grammar accepts.

    Two numbers are equal exactly or not at all (``0.33`` is not ``1/3``). Where the reference answer is a
    number, arithmetic that was not carried out (``3 + 4``) is wrong, although its value is right.

    Returns:
        The judgement, or None if it takes symbolic equality.

    Raises:
        ValueError: the item has no answer.
    """
    if item.answer is None:
        raise ValueError("the math reward needs an answer and the data row has none")
    extracted = final_answer(item.completion)
    if extracted is None:
        return RewardResult(score=0.0, correct=False)
    answer, found = tidy(item.answer), tidy(extracted)
    correct: bool | None = None
    if found == answer:
        correct = True
    else:
        wanted, given = read_number(answer), read_number(found)
        if wanted is not None and given is not None:
            correct = wanted == given
        elif (wanted is not None and is_unevaluated(found)) or not (
            is_parsable(found) and is_parsable(answer)
        ):
            correct = False
    if correct is None:
        return None
    return RewardResult(score=float(correct), correct=correct, extracted=extracted)


MATH = Reward(name="math", quick=quick, worker="relax_rollout.rewards.math.symbolic:judge", memory_gib=4.0)
