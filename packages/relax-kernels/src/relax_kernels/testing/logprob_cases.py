"""Parity cases of the log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from relax_kernels.testing import references
from relax_kernels.testing.case import Case, dtype_name
from relax_kernels.testing.compare import assert_parity, float64_leaves, grads_of, tolerance
from relax_kernels.testing.target import Target


@dataclass(frozen=True)
class _Setting:
    tokens: int = 65
    hidden: int = 64
    vocabulary: int = 517
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    entropy: bool = True
    chunk: int | None = None
    without_target: float = 0.3
    """Fraction of the tokens that have no target."""
    size: float = 0.2
    """Factor on the weight."""
    slack: float = 1.0
    """Factor on the tolerance: the rounding of a logit grows with the logit."""


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for tokens in (1, 3, 63, 64, 65, 127, 1000):
        yield _case(f"tokens-{tokens}", _Setting(tokens=tokens))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield _case(dtype_name(dtype), _Setting(dtype=dtype))
    yield _case("no-entropy", _Setting(entropy=False))
    yield _case("temperature", _Setting(temperature=0.6))
    yield _case("chunks-of-7", _Setting(chunk=7))
    yield _case("every-target", _Setting(without_target=0.0))
    yield _case("no-target", _Setting(without_target=1.0))
    yield _case("large-logits", _Setting(size=20.0, slack=20.0))
    yield _case("one-word", _Setting(vocabulary=1))
    yield _case("wide", _Setting(tokens=20, hidden=256, vocabulary=4099, dtype=torch.bfloat16))


def _case(name: str, setting: _Setting) -> Case:
    return Case("linear_logprob", f"linear_logprob-{name}", partial(_check, setting))


def _check(s: _Setting, target: Target) -> None:
    hidden = target.normal(s.tokens, s.hidden, seed=1, dtype=s.dtype)
    weight = target.normal(s.vocabulary, s.hidden, seed=2).detach().mul(s.size).to(s.dtype).requires_grad_()
    generator = torch.Generator().manual_seed(3)
    token_T = torch.randint(0, s.vocabulary, (s.tokens,), generator=generator)
    token_T[torch.rand(s.tokens, generator=generator) < s.without_target] = -1
    result = target.run(
        "linear_logprob",
        hidden,
        weight,
        token_T.to(target.device),
        temperature=s.temperature,
        with_entropy=s.entropy,
        chunk_tokens=s.chunk,
    )
    grads = grads_of(result, (hidden, weight))
    hidden64, weight64 = leaves = float64_leaves((hidden, weight))
    logprob, entropy = references.linear_logprob(hidden64, weight64, token_T, s.temperature)
    expected = (logprob, entropy if s.entropy else None)
    allowed = tolerance(s.dtype, target.device) * s.slack
    names = "logprob entropy dhidden dweight"
    assert_parity((*result, *grads), (*expected, *grads_of(expected, leaves)), allowed, names)
