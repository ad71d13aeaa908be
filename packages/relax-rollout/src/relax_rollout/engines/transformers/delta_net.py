"""Faster gated delta rule for the model's own modules, where they would use transformers' plain torch one.

N rows, U value heads, K key dim, V value dim, C channels, W conv width; g is the log of the decay.
Formula: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", eq. 10.
"""

import functools
import logging
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger(__name__)

PREFILL_CHUNK = 16
"""transformers pads every prompt to whole chunks (of 64 by default); short prompts want short chunks."""


def l2norm(x: Tensor) -> Tensor:
    """x / |x| over the last axis, with the model's epsilon under the root."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def recurrent_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token per row, the state changed in place: it is read once for key and query together, written
    once.

    Args:
        query: [N, 1, U, K].
        key: [N, 1, U, K].
        value: [N, 1, U, V].
        g: [N, 1, U].
        beta: [N, 1, U].
        initial_state: [N, U, K, V], contiguous float32; holds the new state afterwards.
        output_final_state: always given, for the model's calling convention.
        use_qk_l2norm_in_kernel: normalise query and key first.

    Returns:
        output [N, 1, U, V] in the query's dtype, and ``initial_state``.
    """
    rows, _, heads, dim_k = key.shape
    if use_qk_l2norm_in_kernel:
        query, key = l2norm(query), l2norm(key)
    state = initial_state.view(rows * heads, dim_k, -1)
    q = query.reshape(rows * heads, 1, dim_k).float()
    k = key.reshape(rows * heads, 1, dim_k).float()
    v = value.reshape(rows * heads, 1, -1).float()
    decay = g.reshape(-1, 1, 1).float().exp()
    read = torch.bmm(torch.cat([k, q], dim=1), state)
    delta = (v - decay * read[:, :1]) * beta.reshape(-1, 1, 1).float()
    out = decay * read[:, 1:] + (q * k).sum(-1, keepdim=True) * delta
    state.mul_(decay).baddbmm_(k.transpose(1, 2), delta)
    return (out * dim_k**-0.5).view(rows, 1, heads, -1).to(query.dtype), initial_state


def convolution_step(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """One token per row through the causal convolution, the tail shifted in place.

    Args:
        hidden_states: [N, C, 1], the new inputs.
        conv_state: [N, C, W], the last W inputs; fast if it is a view of [W, N, C] memory.
        weight: [C, W].
        bias: [C] or None.
        activation: the model's, "silu" for all models that have this module.

    Returns:
        [N, C, 1] after the activation (SiLU), in the dtype of ``hidden_states``.
    """
    tail_WNC = conv_state.permute(2, 0, 1)
    for place in range(len(tail_WNC) - 1):
        tail_WNC[place].copy_(tail_WNC[place + 1])
    tail_WNC[-1].copy_(hidden_states[:, :, 0])
    weight_WC = weight.t().float().contiguous()
    out_NC = tail_WNC[0] * weight_WC[0]
    for place in range(1, len(tail_WNC)):
        out_NC = out_NC.addcmul_(tail_WNC[place], weight_WC[place])
    if bias is not None:
        out_NC += bias
    return F.silu(out_NC).to(hidden_states.dtype)[:, :, None]


def use_fast_delta_rule(model: nn.Module) -> int:
    """Give every delta-net module on the plain torch rule our steps, and on the CPU a short prefill chunk.

    Modules that found a fast kernel library keep it.

    Returns:
        Number of modules changed.
    """
    changed = 0
    for module in model.modules():
        home = sys.modules[type(module).__module__]
        plain_chunk: Any = getattr(home, "torch_chunk_gated_delta_rule", None)
        plain_step: Any = getattr(home, "torch_recurrent_gated_delta_rule", None)
        if plain_step is None or getattr(module, "recurrent_gated_delta_rule", None) is not plain_step:
            continue
        rule: Any = module
        rule.recurrent_gated_delta_rule = recurrent_step
        if rule.causal_conv1d_update is getattr(home, "torch_causal_conv1d_update", None):
            rule.causal_conv1d_update = convolution_step
        if rule.chunk_gated_delta_rule is plain_chunk and next(module.parameters()).device.type == "cpu":
            rule.chunk_gated_delta_rule = functools.partial(plain_chunk, chunk_size=PREFILL_CHUNK)
        changed += 1
    return changed
