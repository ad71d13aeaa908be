"""Parity cases of packed attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.testing import references
from relax_kernels.testing.case import Case, dtype_name
from relax_kernels.testing.compare import assert_parity, float64_leaves, grads_of, tolerance
from relax_kernels.testing.target import Target

LENGTHS = (
    (1,),
    (3,),
    (63,),
    (64,),
    (65,),
    (127,),
    (1000,),
    (5, 0, 64, 1, 0, 127, 3),
    (12, 20, 17, 13, 16, 1, 19),
)


@dataclass(frozen=True)
class _Setting:
    queries: tuple[int, ...] = (5, 0, 64, 1, 127)
    keys: tuple[int, ...] | None = None
    heads: tuple[int, int, int] = (2, 1, 64)
    """H, G, D."""
    dtype: torch.dtype = torch.float32
    causal: bool = True
    lse: bool = True
    scale: float | None = None
    size: float = 1.0
    """Factor on q."""
    slack: float = 1.0
    """Factor on the tolerance: the rounding of a score grows with the score."""


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for lengths in LENGTHS:
        yield _case(f"lengths-{'.'.join(map(str, lengths))}", _Setting(queries=lengths))
    yield _case("not-causal", _Setting(causal=False))
    yield _case("more-keys", _Setting(queries=(5, 0, 17, 1), keys=(9, 4, 80, 33)))
    yield _case("more-keys-not-causal", _Setting(queries=(5, 0, 17, 1), keys=(9, 4, 80, 33), causal=False))
    yield _case("more-queries", _Setting(queries=(9, 80, 2, 4), keys=(5, 17, 2, 0)))
    yield _case("no-lse", _Setting(lse=False))
    yield _case("scale", _Setting(scale=0.5))
    yield _case("large-scores", _Setting(size=60.0, slack=20.0))
    for heads in ((2, 2, 64), (4, 2, 128), (8, 2, 256), (3, 1, 96)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            name = f"heads-{'.'.join(map(str, heads))}-{dtype_name(dtype)}"
            yield _case(name, _Setting(queries=(65, 3), heads=heads, dtype=dtype))
    yield _case("float16", _Setting(dtype=torch.float16))
    yield _case("bfloat16-long", _Setting(queries=(1000,), dtype=torch.bfloat16))
    # One length, for which a library may have a kernel of its own: round and not.
    for queries in ((2048, 2048), (2049, 2049)):
        setting = _Setting(queries=queries, heads=(2, 1, 256), dtype=torch.bfloat16, lse=False)
        yield _case(f"one-length-{'.'.join(map(str, queries))}", setting)


def _case(name: str, setting: _Setting) -> Case:
    return Case("attention", f"attention-{name}", partial(_check, setting))


def _check(s: _Setting, target: Target) -> None:
    queries = CuSeqlens.from_lengths(s.queries)
    keys = queries if s.keys is None else CuSeqlens.from_lengths(s.keys)
    H, G, D = s.heads
    q = (target.normal(queries.total, H, D, seed=1).detach() * s.size).to(s.dtype).requires_grad_()
    k = target.normal(keys.total, G, D, seed=2, dtype=s.dtype)
    v = target.normal(keys.total, G, D, seed=3, dtype=s.dtype)
    result = target.run(
        "attention",
        q,
        k,
        v,
        cu_seqlens_q=queries,
        cu_seqlens_k=None if s.keys is None else keys,
        causal=s.causal,
        scale=s.scale,
        return_lse=s.lse,
    )
    o, lse = result if s.lse else (result, None)
    assert o.dtype == s.dtype
    grads = grads_of((o, lse), (q, k, v))
    q64, k64, v64 = leaves = float64_leaves((q, k, v))
    scale = D**-0.5 if s.scale is None else s.scale
    o64, lse64 = references.attention(q64, k64, v64, queries, keys, s.causal, scale)
    expected = (o64, lse64 if s.lse else None)
    allowed = tolerance(s.dtype, target.device) * s.slack
    assert_parity((o, lse, *grads), (*expected, *grads_of(expected, leaves)), allowed, "o lse dq dk dv")
