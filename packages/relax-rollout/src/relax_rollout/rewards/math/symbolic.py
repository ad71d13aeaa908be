"""Symbolic equality by math-verify; imported in worker processes only, which are ended when they run late."""

import logging

from math_verify import LatexExtractionConfig, parse, verify

from relax_rollout.rewards.math.extract import final_answer
from relax_rollout.rewards.math.number import tidy
from relax_rollout.rewards.results import RewardInput, RewardResult

logging.getLogger("math_verify").setLevel(logging.ERROR)


def equal(answer: str, extracted: str) -> bool:
    """Whether both are the same mathematical object.

    Only math-verify's LaTeX grammar is used: its parser for plain expressions ends in ``eval``.
    """
    config = [LatexExtractionConfig()]
    gold, found = (
        parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (answer, extracted)
    )
    return bool(gold and found and verify(gold, found, timeout_seconds=None))


def judge(item: RewardInput) -> RewardResult:
    """The symbolic half of the ``math`` reward, for what its quick half leaves open."""
    assert item.answer is not None, "the quick half refuses items without an answer"
    extracted = final_answer(item.completion)
    assert extracted is not None, "the quick half judges completions without an answer"
    correct = equal(tidy(item.answer), tidy(extracted))
    return RewardResult(score=float(correct), correct=correct, extracted=extracted)
