"""Initial and final states of the delta rule, which fla_npu's backward kernels do not know.

Without gradients the kernels' own states serve. With gradients a state is written as tokens, for which the
kernels have gradients: K tokens with the unit vectors as keys, step size 1, no decay and the state's rows as
values leave exactly that state behind; K tokens with the unit vectors as queries and step size 0 read the
final state out, row by row. K is 128: two chunks before and after each sequence.

N sequences, T tokens, U value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from relax_npu.operators.delta_chunks import Chunks, summed_decay
from relax_npu.operators.delta_kernels import forward_kernels, heads_first

if TYPE_CHECKING:
    from relax_kernels import CuSeqlens

Inputs = tuple[torch.Tensor, ...]


def with_tokens_for_states(
    run: Callable[..., torch.Tensor],
    inputs: Inputs,
    cu_seqlens: CuSeqlens,
    initial_NUKV: torch.Tensor | None,
    output_final_state: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the rule with added tokens. Returns o_TUV and the final states [N, U, K, V] or None."""
    v_TUV = inputs[2]
    key_dim, heads = inputs[0].shape[-1], v_TUV.shape[1]
    writers, readers = _writers(inputs, key_dim), _readers(inputs, key_dim)
    pieces: list[Inputs] = []
    for n, start in enumerate(cu_seqlens.host[:-1]):
        end = cu_seqlens.host[n + 1]
        if initial_NUKV is not None:
            rows_KUV = initial_NUKV[n].transpose(0, 1).to(v_TUV.dtype)
            pieces.append((*writers[:2], rows_KUV, *writers[3:]))
        pieces.append(tuple(x[start:end] for x in inputs))
        if output_final_state:
            pieces.append(readers)
    extended = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    before = key_dim * (initial_NUKV is not None)
    after = key_dim * output_final_state
    longer = cu_seqlens.table(
        ("ascend with tokens for states", before, after),
        lambda: type(cu_seqlens).from_lengths(before + n + after for n in cu_seqlens.lengths),
    )
    o = run(*extended, longer, scale)
    own, read = [o[:0]], []
    for length, start, end in zip(cu_seqlens.lengths, longer.host, longer.host[1:], strict=False):
        own.append(o[start + before : start + before + length])
        read.append(o[start + before + length : end])
    if not output_final_state:
        return torch.cat(own), None
    final_NUKV = torch.stack(read).float().transpose(1, 2) / scale
    return torch.cat(own), final_NUKV.reshape(len(cu_seqlens), heads, key_dim, -1)


def _writers(inputs: Inputs, key_dim: int) -> Inputs:
    _, k, v, g, beta = inputs
    heads = v.shape[1]
    unit = _unit_vectors(k, key_dim, heads)
    return torch.zeros_like(unit), unit, v[:0], g.new_zeros(key_dim, heads), beta.new_ones(key_dim, heads)


def _readers(inputs: Inputs, key_dim: int) -> Inputs:
    q, _, v, g, beta = inputs
    heads = v.shape[1]
    unit = _unit_vectors(q, key_dim, heads)
    none = beta.new_zeros(key_dim, heads)
    return unit, torch.zeros_like(unit), v.new_zeros(key_dim, *v.shape[1:]), g.new_zeros(none.shape), none


def _unit_vectors(like: torch.Tensor, key_dim: int, heads: int) -> torch.Tensor:
    unit_KK = torch.eye(key_dim, device=like.device, dtype=like.dtype)
    return unit_KK[:, None].expand(key_dim, heads, key_dim)


def with_kernel_states(
    inputs: Inputs,
    cu_seqlens: CuSeqlens,
    initial_NUKV: torch.Tensor | None,
    output_final_state: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the forward kernels with their own states, in float32. Returns as `with_tokens_for_states`."""
    q, k, v, g, beta = inputs
    chunks = Chunks.of(cu_seqlens, q.device)
    all_states = initial_NUKV
    if all_states is None:
        # The kernel gives the final states the dtype of the initial ones.
        all_states = q.new_zeros(len(cu_seqlens), v.shape[1], q.shape[-1], v.shape[-1], dtype=torch.float32)
    kept = torch.tensor([n for n, length in enumerate(cu_seqlens.lengths) if length], device=q.device)
    states = all_states.float().index_select(0, kept).contiguous()
    q, k, v, g, beta = heads_first(q, k, v, g.float(), beta.float())
    decay = summed_decay(g[0], chunks)[None]
    o, _, final = forward_kernels((q, k, v, decay, beta), chunks, scale, states, output_final_state)
    o_TUV = o[0].transpose(0, 1)
    if final is None:
        return o_TUV, None
    return o_TUV, all_states.float().index_copy(0, kept, final.float())
