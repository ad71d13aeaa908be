"""Log-probability of a target token straight from hidden states and the head's weight.

T tokens, D hidden, V vocabulary entries (of this rank, when the vocabulary is spread over a process group), K
largest entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from relax_kernels.check import Checker
from relax_kernels.contract import Call
from relax_kernels.registry import implementation


class LogProbs(NamedTuple):
    """Result of `linear_logprob`; float32 (float64 for float64 inputs)."""

    logprob_T: torch.Tensor
    """log softmax(logits)[target]; 0 where the target is -1."""
    entropy_T: torch.Tensor | None
    """Entropy of the softmax in nats; 0 where the target is -1; None if not asked for."""
    topk_logprob_TK: torch.Tensor | None = None
    """The K largest log-probabilities, largest first, without gradient; 0 where the target is -1; None if not
    asked for."""
    topk_index_TK: torch.Tensor | None = None
    """Their token ids, int64, in the vocabulary of all ranks; -1 where the target is -1."""


def linear_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    top_k: int | None = None,
    all_targets: bool = False,
    chunk_tokens: int | None = None,
    process_group: ProcessGroup | None = None,
    reduce_hidden_grad: bool = True,
    backend: str | None = None,
) -> LogProbs:
    """Log-probability (entropy, largest entries) of targets under softmax(hidden @ weight^T / temperature).

    Works over chunks of tokens, so that the logits of all tokens never exist at once; the backward pass
    computes them again. Tokens with target -1 are skipped: they get 0, give no gradient and cost nothing.
    Differentiable in hidden and weight, through log-probability and entropy.

    Args:
        hidden_TD: final hidden states.
        weight_VD: the head's weight, hidden's dtype. With a process group: this rank's rows, equally many on
            each rank, in the order of the ranks.
        target_T: int64 token ids in [0, V of all ranks), or -1 for none. Not checked against the vocabulary's
            size on devices where that would wait for the device.
        temperature: divides the logits; positive.
        with_entropy: also return the entropy.
        top_k: K, from 1 to V of all ranks: also return the K most probable tokens (of equal ones any) and
            their log-probabilities; None for none.
        all_targets: no target is -1. Without this word a backend that skips tokens finds out which, for which
            the host waits for the device. Not checked either where that would wait.
        chunk_tokens: tokens per chunk; None lets the backend choose.
        process_group: ranks over which the vocabulary is spread; each must pass the same hidden states and
            targets.
        reduce_hidden_grad: with a process group, whether hidden's gradient is summed over it here (True: the
            result is complete on each rank) or left partial (False: the caller reduces it, as sequence
            parallelism does).
        backend: name of the backend to use; None lets the registry choose.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit together, or a target is out of range.
        NoBackend: no backend serves the call.
    """
    options: dict[str, Any] = {
        "temperature": temperature,
        "with_entropy": with_entropy,
        "top_k": top_k,
        "all_targets": all_targets,
        "chunk_tokens": chunk_tokens,
        "process_group": process_group,
        "reduce_hidden_grad": reduce_hidden_grad,
    }
    call = linear_logprob_call(hidden_TD, weight_VD, target_T, **options)
    return LogProbs(*implementation(call, backend)(hidden_TD, weight_VD, target_T, **options))


def linear_logprob_call(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    top_k: int | None = None,
    all_targets: bool = False,
    chunk_tokens: int | None = None,
    process_group: ProcessGroup | None = None,
    reduce_hidden_grad: bool = True,
) -> Call:
    """Check the inputs of `linear_logprob` and describe the call."""
    check = Checker("linear_logprob")
    check.tensor("hidden_TD", hidden_TD, "TD")
    check.tensor("weight_VD", weight_VD, "VD", same_dtype_as=hidden_TD)
    check.tensor("target_T", target_T, "T", dtypes=(torch.int64,))
    check.number("temperature", temperature)
    check.require(temperature > 0, f"temperature must be positive, given {temperature}")
    check.flags(with_entropy=with_entropy, all_targets=all_targets, reduce_hidden_grad=reduce_hidden_grad)
    if chunk_tokens is not None:
        check.whole("chunk_tokens", chunk_tokens, 1)
    check.require(check.sizes["V"] > 0, "weight_VD has no rows")
    check.require(
        process_group is None or isinstance(process_group, ProcessGroup),
        f"process_group must be a torch.distributed.ProcessGroup or None, "
        f"given {type(process_group).__name__}",
    )
    ranks = 1 if process_group is None else process_group.size()
    vocabulary = check.sizes["V"] * ranks
    if top_k is not None:
        check.whole("top_k", top_k, 1, vocabulary, "V")
        check.bind("K", top_k, "top_k")
    if target_T.device.type == "cpu" and target_T.numel():
        low, high = (int(bound) for bound in torch.aminmax(target_T))
        check.require(
            low >= (0 if all_targets else -1) and high < vocabulary,
            f"target_T must lie in [0, {vocabulary}){'' if all_targets else ' or be -1'}, given values from "
            f"{low} to {high}{'; all_targets says that none is -1' if all_targets else ''}",
        )
    options = {
        "temperature": temperature,
        "with_entropy": with_entropy,
        "top_k": top_k,
        "all_targets": all_targets,
        "chunk_tokens": chunk_tokens,
        "process_group": process_group,
        "reduce_hidden_grad": reduce_hidden_grad,
    }
    return check.call([hidden_TD, weight_VD], options)
