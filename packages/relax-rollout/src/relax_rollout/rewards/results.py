"""What a reward is given and what it gives back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One completion to judge.

    Args:
        prompt: the prompt's text, or its chat messages.
        completion: the text that the model wrote.
        answer: the reference answer, if the data has one.
        metadata: the other columns of the data row.
    """

    prompt: str | Messages
    completion: str
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What a reward says about one completion.

    Args:
        score: finite; what the algorithm learns from.
        correct: whether the answer is right, where that has a meaning; for accuracy.
        extracted: the final answer found in the completion, if any.
        error: why there is no judgement; the score is then the runner's fallback.
        elapsed_s: seconds spent on it.
        worker: the process that judged, "host:process id"; None for what was judged in the caller's.
        ended_at: when that process was done, in seconds of its `time.time()`.
    """

    score: float
    correct: bool | None = None
    extracted: str | None = None
    error: str | None = None
    elapsed_s: float = 0.0
    worker: str | None = field(default=None, compare=False)
    ended_at: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward as a :class:`RewardRunner` runs it.

    Args:
        name: for logs and errors.
        quick: judges at once in this process, or returns None for what the worker has to judge. It must be
            cheap, and safe on hostile text.
        worker: ``module:function`` that a worker process imports for the rest; None if ``quick`` judges
            everything.
        concurrent: the worker's function is a coroutine function: one process runs many calls at a time.
        memory_gib: address space of a worker process above which it fails, in GiB; None sets no limit.
    """

    name: str
    quick: Callable[[RewardInput], RewardResult | None]
    worker: str | None = None
    concurrent: bool = False
    memory_gib: float | None = None
