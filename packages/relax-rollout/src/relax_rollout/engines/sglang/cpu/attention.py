"""Attention over SGLang's paged key-value pool on the CPU, in float32, for every forward mode.

N rows, L queries of a row, S keys of a row, T tokens, G key-value heads, Q query heads per key-value head,
R head dim. A token at position p attends to the positions 0 to p of its own row, which holds for prefill,
decode, draft steps and the verification of a chain of drafts alike.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

MAX_SCORES = 2**26
"""Scores held at once (256 MiB); more rows than fit are taken in parts."""


class CpuAttention(AttentionBackend):  # type: ignore[misc]
    """Registered with SGLang under the name ``torch_native``."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.max_context_len = runner.model_config.context_len

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing is prepared."""

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Store keys and values, attend."""
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        return self._attend(q, layer, forward_batch)

    forward_decode = forward_extend

    def _attend(self, q: Tensor, layer: Any, forward_batch: Any) -> Tensor:
        groups = layer.tp_k_head_num
        q_TGQR = q.reshape(-1, groups, layer.tp_q_head_num // groups, layer.qk_head_dim).float()
        slots_N = forward_batch.req_pool_indices.long()
        lengths_N = _lengths(forward_batch, len(q_TGQR), len(slots_N))
        position_T = forward_batch.positions[: len(q_TGQR)].long()
        out_TD = q.new_empty(len(q_TGQR), layer.tp_q_head_num * layer.v_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        table = self.req_to_token_pool.req_to_token
        longest = int(position_T.max()) + 1 if len(position_T) else 1
        step = max(1, MAX_SCORES // (longest * int(lengths_N.max()) * layer.tp_q_head_num))
        start = 0
        for row in range(0, len(slots_N), step):
            lengths = lengths_N[row : row + step]
            end = start + int(lengths.sum())
            if end > start:
                out_TD[start:end] = attend(
                    q_TGQR[start:end],
                    position_T[start:end],
                    lengths,
                    table[slots_N[row : row + step]],
                    keys,
                    values,
                    layer.scaling,
                ).to(q.dtype)
            start = end
        return out_TD


def _lengths(forward_batch: Any, tokens: int, rows: int) -> Tensor:
    given = forward_batch.extend_seq_lens
    if given is not None and not forward_batch.forward_mode.is_decode() and int(given.sum()) == tokens:
        return given.long()  # type: ignore[no-any-return]
    return torch.full((rows,), tokens // rows)


def attend(
    q_TGQR: Tensor,
    position_T: Tensor,
    lengths_N: Tensor,
    table_NP: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
) -> Tensor:
    """Attention of packed rows.

    Args:
        q_TGQR: float32.
        position_T: int64, of each token in its row.
        lengths_N: int64, tokens of each row, sum T.
        table_NP: slot of the pool that holds each position of each row.
        keys: pool [slots, G, R].
        values: as ``keys``.
        scale: of the scores.

    Returns:
        [T, G * Q * R] float32.
    """
    rows, longest = len(lengths_N), int(lengths_N.max())
    row_T = torch.repeat_interleave(torch.arange(rows), lengths_N)
    place_T = torch.arange(len(row_T)) - (lengths_N.cumsum(0) - lengths_N)[row_T]
    q_NLGQR = q_TGQR.new_zeros(rows, longest, *q_TGQR.shape[1:])
    q_NLGQR[row_T, place_T] = q_TGQR
    position_NL = torch.zeros(rows, longest, dtype=torch.long)
    position_NL[row_T, place_T] = position_T
    reach = int(position_T.max()) + 1
    slot_NS = table_NP[:, :reach].long()
    seen_NLS = torch.arange(reach) <= position_NL[..., None]
    # Slots beyond a row's end may hold anything, NaN included: their values must not enter, not even times 0.
    held_NS = torch.arange(reach) <= position_NL.amax(1)[:, None]
    k_NSGR = keys[slot_NS].float().masked_fill(~held_NS[..., None, None], 0.0)
    v_NSGR = values[slot_NS].float().masked_fill(~held_NS[..., None, None], 0.0)
    score = torch.einsum("nlgqr,nsgr->ngqls", q_NLGQR, k_NSGR) * scale
    weight = score.masked_fill(~seen_NLS[:, None, None], -torch.inf).softmax(-1)
    out_NLGQR = torch.einsum("ngqls,nsgr->nlgqr", weight, v_NSGR)
    return out_NLGQR[row_T, place_T].flatten(1)
