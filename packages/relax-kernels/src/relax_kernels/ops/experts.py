"""Mixture of experts: the router's choice, rows sorted by expert and back, and the experts' matrix products.

T tokens, E experts, K experts of each token, P = T * K rows sorted by expert, D features in, F features out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from relax_kernels.check import Checker
from relax_kernels.contract import Call
from relax_kernels.registry import implementation

_INDEX = (torch.int64,)


class Routing(NamedTuple):
    """Result of `router_topk`."""

    weight_TK: torch.Tensor
    """Share of each chosen expert, float32 (float64 for float64 logits), largest first."""
    expert_TK: torch.Tensor
    """Chosen experts, int64; of equal logits the lower index first."""


class Permutation(NamedTuple):
    """Where rows go when they are sorted by expert; among rows of one expert, tokens keep their order."""

    row_TK: torch.Tensor
    """Row of each (token, choice) among the P, int64."""
    token_P: torch.Tensor
    """Token of each row, int64."""
    count_E: torch.Tensor
    """Rows of each expert, int64; their sum is P."""


def router_topk(
    logits_TE: torch.Tensor, *, top_k: int, normalise: bool = True, backend: str | None = None
) -> Routing:
    """Choose each token's top_k experts by the softmax of its logits; differentiable in the weights.

    The softmax is taken over all experts in float32 (float64 for float64 logits).

    Args:
        logits_TE: router logits.
        top_k: K, from 1 to E.
        normalise: divide the chosen weights by their sum, as Qwen3.5 does.
        backend: name of the backend to use; None lets the registry choose.

    Raises:
        InvalidInput: shape, dtype or top_k do not fit.
        NoBackend: no backend serves the call.
    """
    call = router_topk_call(logits_TE, top_k=top_k, normalise=normalise)
    return Routing(*implementation(call, backend)(logits_TE, top_k=top_k, normalise=normalise))


def router_topk_call(logits_TE: torch.Tensor, *, top_k: int, normalise: bool = True) -> Call:
    """Check the inputs of `router_topk` and describe the call."""
    check = Checker("router_topk")
    check.tensor("logits_TE", logits_TE, "TE")
    experts = check.sizes["E"]
    check.whole("top_k", top_k, 1, experts, "E")
    check.bind("K", top_k, "top_k")
    check.flags(normalise=normalise)
    return check.call([logits_TE], {"top_k": top_k, "normalise": normalise})


def sort_by_expert(expert_TK: torch.Tensor, *, experts: int, backend: str | None = None) -> Permutation:
    """Return the permutation that sorts the T * K (token, choice) rows by expert, stably; no gradient.

    Args:
        expert_TK: int64 experts in [0, experts). Not checked on devices where that would wait for the device.
        experts: E.
        backend: name of the backend to use; None lets the registry choose.

    Raises:
        InvalidInput: shape, dtype or an index do not fit.
        NoBackend: no backend serves the call.
    """
    call = sort_by_expert_call(expert_TK, experts=experts)
    return Permutation(*implementation(call, backend)(expert_TK, experts=experts))


def sort_by_expert_call(expert_TK: torch.Tensor, *, experts: int) -> Call:
    """Check the inputs of `sort_by_expert` and describe the call."""
    check = Checker("sort_by_expert")
    check.tensor("expert_TK", expert_TK, "TK", dtypes=_INDEX)
    check.whole("experts", experts, 1)
    check.bind("E", experts, "experts")
    if expert_TK.device.type == "cpu" and expert_TK.numel():
        low, high = (int(bound) for bound in torch.aminmax(expert_TK))
        check.require(
            low >= 0 and high < experts,
            f"expert_TK must lie in [0, {experts}), given values from {low} to {high}",
        )
    return check.call([expert_TK], {"experts": experts})


def permute_tokens(
    x_TD: torch.Tensor, permutation: Permutation, *, backend: str | None = None
) -> torch.Tensor:
    """Return x_PD, each token's features once for each of its experts, sorted by expert; differentiable in x.

    Args:
        x_TD: tokens.
        permutation: from `sort_by_expert`.
        backend: name of the backend to use; None lets the registry choose.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit together.
        NoBackend: no backend serves the call.
    """
    call = permute_tokens_call(x_TD, permutation)
    result: torch.Tensor = implementation(call, backend)(x_TD, permutation)
    return result


def permute_tokens_call(x_TD: torch.Tensor, permutation: Permutation) -> Call:
    """Check the inputs of `permute_tokens` and describe the call."""
    check = Checker("permute_tokens")
    check.tensor("x_TD", x_TD, "TD")
    _check_permutation(check, permutation)
    return check.call([x_TD], {})


def unpermute_tokens(
    y_PD: torch.Tensor,
    permutation: Permutation,
    weight_TK: torch.Tensor,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Return for each token the weighted sum of its experts' rows; differentiable in rows and weights.

    Args:
        y_PD: rows sorted by expert.
        permutation: from `sort_by_expert`.
        weight_TK: weights, any float dtype.
        backend: name of the backend to use; None lets the registry choose.

    Returns:
        [T, D] in y's dtype; summed in float32 (float64 for float64 rows).

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit together.
        NoBackend: no backend serves the call.
    """
    call = unpermute_tokens_call(y_PD, permutation, weight_TK)
    result: torch.Tensor = implementation(call, backend)(y_PD, permutation, weight_TK)
    return result


def unpermute_tokens_call(y_PD: torch.Tensor, permutation: Permutation, weight_TK: torch.Tensor) -> Call:
    """Check the inputs of `unpermute_tokens` and describe the call."""
    check = Checker("unpermute_tokens")
    check.tensor("y_PD", y_PD, "PD")
    _check_permutation(check, permutation)
    check.tensor("weight_TK", weight_TK, "TK")
    return check.call([y_PD, weight_TK], {})


def grouped_matmul(
    x_PD: torch.Tensor, weight_EFD: torch.Tensor, count_E: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Multiply each expert's rows by its own matrix: y = x @ weight[e]^T; differentiable in x and weight.

    Args:
        x_PD: rows sorted by expert.
        weight_EFD: one [out, in] matrix per expert, x's dtype.
        count_E: rows of each expert, int64, sum P. Not checked on devices where that would wait for the
            device.
        backend: name of the backend to use; None lets the registry choose.

    Returns:
        y_PF in x's dtype; products are summed in float32 (float64 for float64 inputs).

    Raises:
        InvalidInput: shapes, dtypes, devices or counts do not fit together.
        NoBackend: no backend serves the call.
    """
    call = grouped_matmul_call(x_PD, weight_EFD, count_E)
    result: torch.Tensor = implementation(call, backend)(x_PD, weight_EFD, count_E)
    return result


def grouped_matmul_call(x_PD: torch.Tensor, weight_EFD: torch.Tensor, count_E: torch.Tensor) -> Call:
    """Check the inputs of `grouped_matmul` and describe the call."""
    check = Checker("grouped_matmul")
    check.tensor("x_PD", x_PD, "PD")
    check.tensor("weight_EFD", weight_EFD, "EFD", same_dtype_as=x_PD)
    check.tensor("count_E", count_E, "E", dtypes=_INDEX)
    if count_E.device.type == "cpu":
        counts = count_E.tolist()
        rows = check.sizes["P"]
        check.require(
            min(counts, default=0) >= 0 and sum(counts) == rows,
            f"count_E must be numbers of rows with sum P = {rows}, given sum {sum(counts)}",
        )
    return check.call([x_PD, weight_EFD], {})


def _check_permutation(check: Checker, permutation: Permutation) -> None:
    if not isinstance(permutation, Permutation):
        raise check.fail(f"permutation must come from sort_by_expert, given {type(permutation).__name__}")
    check.tensor("permutation.row_TK", permutation.row_TK, "TK", dtypes=_INDEX)
    check.tensor("permutation.token_P", permutation.token_P, "P", dtypes=_INDEX)
    check.tensor("permutation.count_E", permutation.count_E, "E", dtypes=_INDEX)
    rows = check.sizes["T"] * check.sizes["K"]
    check.require(
        check.sizes["P"] == rows, f"permutation has {check.sizes['P']} rows, but T * K = {rows} are needed"
    )
