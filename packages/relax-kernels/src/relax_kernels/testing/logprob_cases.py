"""Parity cases of the log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from relax_kernels.testing import references
from relax_kernels.testing.case import Case, dtype_name
from relax_kernels.testing.compare import assert_near, assert_parity, float64_leaves, grads_of, tolerance
from relax_kernels.testing.target import Target


@dataclass(frozen=True)
class _Setting:
    tokens: int = 65
    hidden: int = 64
    vocabulary: int = 517
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    entropy: bool = True
    top_k: int | None = None
    chunk: int | None = None
    without_target: float = 0.3
    """Fraction of the tokens that have no target."""
    promised: bool = False
    """Whether the call says that all have one."""
    size: float = 0.2
    """Factor on the weight."""
    slack: float = 1.0
    """Factor on the tolerance: the rounding of a logit grows with the logit."""
    fixed: bool = False
    """Whether the head wants no gradient."""


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
    for tokens in (0, 65):
        yield _case(
            f"all-targets-{tokens}", _Setting(tokens=tokens, without_target=0.0, promised=True, top_k=3)
        )
    yield _case("no-target", _Setting(without_target=1.0))
    yield _case("large-logits", _Setting(size=20.0, slack=20.0))
    yield _case("one-word", _Setting(vocabulary=1, top_k=1))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        yield _case(f"top-20-{dtype_name(dtype)}", _Setting(dtype=dtype, top_k=20))
    yield _case("top-1-in-chunks", _Setting(top_k=1, chunk=7, entropy=False))
    yield _case("top-5-temperature", _Setting(top_k=5, temperature=0.6, without_target=0.0))
    yield _case("top-of-no-target", _Setting(top_k=5, without_target=1.0))
    yield _case("top-of-all", _Setting(top_k=517))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        fixed = _Setting(fixed=True, dtype=dtype, entropy=False, temperature=0.7)
        yield _case(f"fixed-head-{dtype_name(dtype)}", fixed)
    yield _case("fixed-head-entropy", _Setting(fixed=True, dtype=torch.bfloat16))
    yield _case("fixed-head-all-targets", replace(fixed, without_target=0.0, promised=True))
    large = _Setting(fixed=True, dtype=torch.bfloat16, entropy=False, size=20.0, slack=20.0)
    yield _case("fixed-head-large-logits", large)
    # Qwen3.5's vocabulary: hidden's gradient sums a quarter of a million products in float32.
    whole = _Setting(tokens=3, hidden=16, vocabulary=248320, top_k=8, size=1.0, slack=10.0)
    yield _case("vocabulary-248320", whole)
    yield _case("top-20-long", _Setting(tokens=1000, top_k=20, dtype=torch.bfloat16))
    yield _case("wide", _Setting(tokens=20, hidden=256, vocabulary=4099, dtype=torch.bfloat16))


def _case(name: str, setting: _Setting) -> Case:
    return Case("linear_logprob", f"linear_logprob-{name}", partial(_check, setting))


def _check(s: _Setting, target: Target) -> None:
    hidden = target.normal(s.tokens, s.hidden, seed=1, dtype=s.dtype)
    weight = target.normal(s.vocabulary, s.hidden, seed=2).detach().mul(s.size).to(s.dtype)
    weight.requires_grad_(not s.fixed)
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
        top_k=s.top_k,
        all_targets=s.promised,
        chunk_tokens=s.chunk,
    )
    trained = (hidden,) if s.fixed else (hidden, weight)
    grads = grads_of(result, trained)
    hidden64, weight64 = float64_leaves((hidden, weight))
    leaves = (hidden64, weight64)[: len(trained)]
    logprob, entropy = references.linear_logprob(hidden64, weight64, token_T, s.temperature)
    expected = (logprob, entropy if s.entropy else None)
    allowed = tolerance(s.dtype, target.device) * s.slack
    names = "logprob entropy dhidden" if s.fixed else "logprob entropy dhidden dweight"
    assert_parity((*result[:2], *grads), (*expected, *grads_of(expected, leaves)), allowed, names)
    if s.top_k is None:
        assert result[2:] == (None, None), "top-k was not asked for"
    else:
        sorted_TV, order_TV = references.sorted_logprob(hidden64.detach(), weight64.detach(), s.temperature)
        _check_largest(s, result.topk_logprob_TK, result.topk_index_TK, token_T, sorted_TV, order_TV, allowed)


def _check_largest(
    s: _Setting,
    logprob_TK: torch.Tensor,
    index_TK: torch.Tensor,
    token_T: torch.Tensor,
    sorted_TV: torch.Tensor,
    order_TV: torch.Tensor,
    allowed: float,
) -> None:
    """Values are those of a sort; ids, of which near ones may change places, belong to these values."""
    assert not logprob_TK.requires_grad, "top-k has a gradient"
    assert index_TK.dtype == torch.int64
    without_T1, index_TK = token_T[:, None] < 0, index_TK.cpu()
    assert_near(logprob_TK, sorted_TV[:, : s.top_k].masked_fill(without_T1, 0.0), allowed, "topk_logprob")
    assert torch.equal(index_TK == -1, without_T1.expand_as(index_TK)), "ids where there is no target"
    has_target_T = ~without_T1[:, 0]
    chosen_SK = index_TK[has_target_T]
    assert all(len(set(row)) == s.top_k for row in chosen_SK.tolist()), "an id twice"
    by_id_TV = torch.empty_like(sorted_TV).scatter_(1, order_TV, sorted_TV)
    of_ids_SK = by_id_TV[has_target_T].gather(1, chosen_SK)
    assert_near(logprob_TK.cpu()[has_target_T], of_ids_SK, allowed, "log-probabilities of topk_index")
    if s.dtype == torch.float64:
        assert torch.equal(chosen_SK, order_TV[has_target_T, : s.top_k]), "ids differ"
