"""Full attention of a row that context-parallel ranks share.

Axes: T tokens held here, S tokens of the whole row, H query heads, G key/value heads, D features of a head.

"gather": every rank gets all keys and values and attends with its own queries. The keys that the queries of a
chunk see are one stretch of the row: from where the first of their samples begins to the chunk's end. So each
of the two chunks is one attention call with its queries aligned to the end of their keys, the result is
final (there is nothing to merge), and neither the number of collectives nor of calls depends on the samples.
"heads": every rank gets all tokens of its share of the heads, and attends as one rank would.
"""

from math import lcm
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from relax_kernels import CuSeqlens, attention

from relax_core.model.context.choose import AttentionWay
from relax_core.model.context.exchange import gathered_order, join_heads, spread_heads, take
from relax_core.packing import PackedLayout
from relax_core.packing.zigzag import Piece, zigzag_ranges


def context_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: PackedLayout,
    *,
    way: AttentionWay,
    group: Any,
) -> torch.Tensor:
    """Causal attention of each sample over itself, for this rank's tokens: [T, H, D].

    Args:
        q_THD: queries, positions already turned in.
        k_TGD: keys, likewise.
        v_TGD: values.
        layout: the row and this rank's part of it.
        way: how the ranks share the work; "heads" needs H to be a multiple of the ranks.
        group: the context-parallel ranks.
    """
    if layout.context_size == 1:
        return cast(torch.Tensor, attention(q_THD, k_TGD, v_TGD, cu_seqlens_q=layout.cu_seqlens))
    if way == "heads":
        return _over_heads(q_THD, k_TGD, v_TGD, layout, group)
    return _over_gathered_keys(q_THD, k_TGD, v_TGD, layout, group)


def _over_gathered_keys(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, layout: PackedLayout, group: Any
) -> torch.Tensor:
    kv_T2GD = torch.stack([k_TGD, v_TGD], dim=1)
    kv_S2GD = gather_from_sequence_parallel_region(kv_T2GD, group=group)
    kv_S2GD = take(kv_S2GD, gathered_order(layout, kv_S2GD.device)[0])
    pieces = layout.table(("query pieces",), lambda: _query_pieces(layout))
    outputs = []
    for (keys, lengths_q, lengths_k), queries_THD in zip(pieces, q_THD.chunk(len(pieces)), strict=True):
        k_SGD, v_SGD = kv_S2GD[keys].unbind(1)
        outputs.append(
            cast(
                torch.Tensor,
                attention(queries_THD, k_SGD, v_SGD, cu_seqlens_q=lengths_q, cu_seqlens_k=lengths_k),
            )
        )
    return torch.cat(outputs)


def _query_pieces(layout: PackedLayout) -> list[tuple[slice, CuSeqlens, CuSeqlens]]:
    """Per chunk of this rank: the stretch of keys that its queries see, and the segments of both."""
    pieces = []
    for start, stop in zigzag_ranges(layout.padded_total, layout.context_size, layout.context_rank):
        piece = Piece.cut(layout.cu_seqlens, start, stop)
        first, *others = piece.lengths
        lengths_k = CuSeqlens.from_lengths((piece.carried + first, *others))
        pieces.append((slice(start - piece.carried, stop), CuSeqlens.from_lengths(piece.lengths), lengths_k))
    return pieces


def _over_heads(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, layout: PackedLayout, group: Any
) -> torch.Tensor:
    # With fewer key/value heads than ranks, several ranks attend with one of them.
    copies = lcm(k_TGD.shape[1], group.size()) // k_TGD.shape[1]
    k_TGD, v_TGD = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (k_TGD, v_TGD))
    parts = (q_THD, k_TGD, v_TGD)
    row_SP = spread_heads(parts, layout, group)
    shares = torch.split(row_SP, [part[0].numel() // group.size() for part in parts], dim=-1)
    q_SHD, k_SGD, v_SGD = (x.reshape(len(x), -1, q_THD.shape[-1]) for x in shares)
    o_SHD = attention(q_SHD, k_SGD, v_SGD, cu_seqlens_q=layout.cu_seqlens)
    return join_heads(cast(torch.Tensor, o_SHD), layout, group)
