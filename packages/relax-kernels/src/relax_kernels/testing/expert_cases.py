"""Parity cases of the mixture-of-experts operators."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from relax_kernels.ops.experts import Permutation
from relax_kernels.testing.case import Case, dtype_name
from relax_kernels.testing.compare import assert_parity, float64_leaves, grads_of, tolerance
from relax_kernels.testing.target import Target

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for dtype in DTYPES:
        name = dtype_name(dtype)
        for tokens, experts, top_k in ((1, 4, 2), (65, 8, 2), (127, 64, 8), (33, 256, 8)):
            for normalise in (True, False):
                run = partial(_check_router, tokens, experts, top_k, normalise, dtype)
                named = f"{tokens}.{experts}.{top_k}{'' if normalise else '-plain'}-{name}"
                yield Case("router_topk", f"router_topk-{named}", run)
        for tokens, experts in ((1, 4), (65, 8), (300, 5)):
            move = partial(_check_moves, tokens, experts, dtype)
            multiply = partial(_check_matmul, tokens, dtype)
            yield Case("permute_tokens", f"permute_tokens-{tokens}.{experts}-{name}", move)
            yield Case("grouped_matmul", f"grouped_matmul-{tokens}-{name}", multiply)
    yield Case("sort_by_expert", "sort_by_expert-by-hand", _check_sort)
    yield Case("sort_by_expert", "sort_by_expert-many", _check_long_sort)


def _check_router(
    tokens: int, experts: int, top_k: int, normalise: bool, dtype: torch.dtype, target: Target
) -> None:
    logits = target.normal(tokens, experts, seed=1, dtype=dtype)
    weight, expert = target.run("router_topk", logits, top_k=top_k, normalise=normalise)
    (logits64,) = leaves = float64_leaves((logits,))
    p = torch.softmax(logits64, -1)
    # Equal logits are common in bfloat16; the expected choice takes the lower index first.
    chosen = torch.tensor([_ranking(row)[:top_k] for row in logits64.tolist()])
    assert torch.equal(expert.cpu(), chosen), "chosen experts differ"
    expected = p.gather(1, chosen)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    allowed = tolerance(dtype, target.device)
    grads, expected_grads = grads_of((weight,), (logits,)), grads_of((expected,), leaves)
    assert_parity((weight, *grads), (expected, *expected_grads), allowed, "weight dlogits")


def _ranking(logit_E: list[float]) -> list[int]:
    return sorted(range(len(logit_E)), key=lambda expert: (-logit_E[expert], expert))


def _check_sort(target: Target) -> None:
    expert = torch.tensor([[2, 0], [0, 3], [2, 3], [0, 2]], device=target.device)
    row, token, count = target.run("sort_by_expert", expert, experts=5)
    assert token.tolist() == [0, 1, 3, 0, 2, 3, 1, 2]
    assert row.tolist() == [[3, 0], [1, 6], [4, 7], [2, 5]]
    assert count.tolist() == [3, 0, 3, 2, 0]


def _check_long_sort(target: Target) -> None:
    expert, expected = _choices(3000, 5), _permutation(3000, 5, "cpu")
    sorted_here = target.run("sort_by_expert", expert.to(target.device), experts=5)
    for mine, other in zip(sorted_here, expected, strict=True):
        assert torch.equal(mine.cpu(), other)


def _choices(tokens: int, experts: int) -> torch.Tensor:
    """Two different experts of each token."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :2].contiguous()


def _permutation(tokens: int, experts: int, device: str) -> Permutation:
    """The choices, sorted in plain Python."""
    expert = _choices(tokens, experts)
    order = sorted(range(2 * tokens), key=lambda choice: (int(expert[choice // 2, choice % 2]), choice))
    row = torch.empty(2 * tokens, dtype=torch.int64)
    row[torch.tensor(order)] = torch.arange(2 * tokens)
    count = torch.bincount(expert.flatten(), minlength=experts)
    token = torch.tensor([choice // 2 for choice in order])
    return Permutation(row.view(tokens, 2).to(device), token.to(device), count.to(device))


def _check_moves(tokens: int, experts: int, dtype: torch.dtype, target: Target) -> None:
    permutation = _permutation(tokens, experts, target.device)
    x = target.normal(tokens, 64, seed=1, dtype=dtype)
    rows = target.normal(2 * tokens, 64, seed=2, dtype=dtype)
    weight = target.normal(
        tokens, 2, seed=3, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    inputs = (x, rows, weight)
    outputs = (
        target.run("permute_tokens", x, permutation),
        target.run("unpermute_tokens", rows, permutation, weight),
    )
    x64, rows64, weight64 = leaves = float64_leaves(inputs)
    row_TK = permutation.row_TK.cpu()
    expected = (x64[permutation.token_P.cpu()], (rows64[row_TK] * weight64[..., None]).sum(1))
    allowed = tolerance(dtype, target.device)
    grads, expected_grads = grads_of(outputs, inputs), grads_of(expected, leaves)
    assert_parity(
        (*outputs, *grads), (*expected, *expected_grads), allowed, "permuted unpermuted dx drows dweight"
    )


def _check_matmul(tokens: int, dtype: torch.dtype, target: Target) -> None:
    counts = [tokens, 0, 2 * tokens, 1, 0]
    count = torch.tensor(counts, device=target.device)
    x = target.normal(sum(counts), 64, seed=1, dtype=dtype)
    weight = target.normal(5, 128, 64, seed=2, dtype=dtype)
    y = target.run("grouped_matmul", x, weight, count)
    x64, weight64 = leaves = float64_leaves((x, weight))
    parts = [rows @ matrix.T for rows, matrix in zip(x64.split(counts), weight64, strict=True)]
    expected = (torch.cat(parts),)
    allowed = tolerance(dtype, target.device)
    grads, expected_grads = grads_of((y,), (x, weight)), grads_of(expected, leaves)
    assert_parity((y, *grads), (*expected, *expected_grads), allowed, "y dx dweight")
