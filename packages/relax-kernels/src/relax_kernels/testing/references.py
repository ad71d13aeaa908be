"""Operators written as their formulas say, sequence by sequence: what the parity cases compare with.

Axes as in the public operators. Everything is plain autograd, meant for float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.torch_backend.delta_step import naive_gated_delta_rule as gated_delta_rule

__all__ = [
    "attention",
    "causal_conv1d",
    "delta_gates",
    "gated_delta_rule",
    "gated_rms_norm",
    "linear_logprob",
    "rms_norm",
    "rotary",
    "segments",
    "sorted_logprob",
]


def segments(x_T: torch.Tensor, lengths: CuSeqlens) -> Iterator[torch.Tensor]:
    """Yield the rows of each sequence."""
    for start, end in zip(lengths.host, lengths.host[1:], strict=False):
        yield x_T[start:end]


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    lengths: CuSeqlens,
    activation: str | None,
    initial_NCW: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve by torch's own conv1d, one sequence at a time; return outputs and final states."""
    channels, width = weight_CW.shape
    outputs, states = [x_TC[:0]], []
    for index, x in enumerate(segments(x_TC, lengths)):
        before_CW = x.new_zeros(channels, width - 1) if initial_NCW is None else initial_NCW[index]
        seen_CT = torch.cat((before_CW, x.T), -1)
        states.append(seen_CT[:, seen_CT.shape[1] - (width - 1) :])
        if len(x):
            outputs.append(F.conv1d(seen_CT[None], weight_CW[:, None], bias_C, groups=channels)[0].T)
    y_TC = torch.cat(outputs)
    return F.silu(y_TC) if activation == "silu" else y_TC, torch.stack(states)


def attention(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGE: torch.Tensor,
    queries: CuSeqlens,
    keys: CuSeqlens,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and log-sum-exp by whole score matrices, one sequence at a time."""
    group = q_THD.shape[1] // k_SGD.shape[1]
    outputs, lses = [], []
    for q, k, v in zip(segments(q_THD, queries), segments(k_SGD, keys), segments(v_SGE, keys), strict=True):
        n, m = len(q), len(k)
        k_HSD, v_HSE = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k_HSD.mT * scale
        if causal:
            scores = scores.masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
        lse = torch.logsumexp(scores, -1)
        sees_nothing = lse.isinf()
        p = (scores - lse.masked_fill(sees_nothing, 0.0)[..., None]).exp()
        outputs.append((p @ v_HSE).transpose(0, 1))
        lses.append(lse.T)
    return torch.cat(outputs), torch.cat(lses)


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float, zero_centred: bool) -> torch.Tensor:
    """Return the norm by its formula."""
    return (
        x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight_D + 1.0 if zero_centred else weight_D)
    )


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm times silu of the gate."""
    return rms_norm(x, weight_D, eps, False) * gate / (1 + (-gate).exp())


def delta_gates(
    a_TU: torch.Tensor, b_TU: torch.Tensor, A_log_U: torch.Tensor, dt_bias_U: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decay and step size; softplus(x) = log(e^0 + e^x)."""
    x_TU = a_TU + dt_bias_U
    return -A_log_U.exp() * torch.logaddexp(torch.zeros_like(x_TU), x_TU), 1 / (1 + (-b_TU).exp())


def rotary(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotate by complex numbers: pair r is the number x_r + i x_(r + R / 2)."""
    half = cos_TR.shape[1] // 2
    z = torch.complex(x_THD[..., :half], x_THD[..., half : 2 * half])
    turned = z * torch.complex(cos_TR[:, None, :half], sin_TR[:, None, :half])
    return torch.cat((turned.real, turned.imag, x_THD[..., 2 * half :]), -1)


def linear_logprob(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy from the whole table of logits; 0 where there is no target."""
    logp_TV = torch.log_softmax(hidden_TD @ weight_VD.T / temperature, -1)
    has_target = target_T >= 0
    chosen = logp_TV.gather(1, target_T.clamp(0)[:, None])[:, 0]
    entropy = -(logp_TV.exp() * logp_TV).sum(-1)
    return torch.where(has_target, chosen, 0.0), torch.where(has_target, entropy, 0.0)


def sorted_logprob(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all log-probabilities of each token, largest first, and the ids they belong to."""
    logp_TV = torch.log_softmax(hidden_TD @ weight_VD.T / temperature, -1)
    return logp_TV.sort(dim=-1, descending=True)
