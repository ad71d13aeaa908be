"""Convolution and gated delta rule of a row that context-parallel ranks may share.

Axes: T tokens, C = 2 H K + U V convolved channels (those of q, of k, of v), U value heads, V value dim, W
taps.

"heads": one all-to-all gives every rank the whole row of its share of the heads, another brings the result
back.
"state": one all-to-all gives every rank a contiguous piece of the row and the few tokens before it that the
convolution looks back to; `delta_state` scans it; another all-to-all brings the result back.
"""

from dataclasses import dataclass
from typing import Any

import torch
from relax_kernels import CuSeqlens, causal_conv1d, delta_gates, gated_delta_rule

from relax_core.model.context.choose import DeltaWay
from relax_core.model.context.delta_state import pieces_of, scan_piece
from relax_core.model.context.exchange import Ranges, Route, exchange, join_heads, spread_heads
from relax_core.packing import PackedLayout
from relax_core.packing.zigzag import zigzag_ranges


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of a delta net, or a share of them, with their weights.

    Attributes:
        key_heads, key_dim, value_heads, value_dim: their numbers and sizes.
        conv_CW: taps of every channel.
        a_log_U: logarithm of the decay's rate.
        dt_bias_U: added to the decay's input.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_CW: torch.Tensor
    a_log_U: torch.Tensor
    dt_bias_U: torch.Tensor

    @property
    def channels(self) -> list[int]:
        """Channels of q, k and v."""
        keys = self.key_heads * self.key_dim
        return [keys, keys, self.value_heads * self.value_dim]

    def share(self, rank: int, ranks: int) -> "DeltaHeads":
        """The heads that `rank` of `ranks` works on; gradients reach the whole weights."""
        conv = [part.chunk(ranks)[rank] for part in torch.split(self.conv_CW, self.channels)]
        return DeltaHeads(
            self.key_heads // ranks,
            self.key_dim,
            self.value_heads // ranks,
            self.value_dim,
            torch.cat(conv),
            self.a_log_U.chunk(ranks)[rank],
            self.dt_bias_U.chunk(ranks)[rank],
        )

    def convolve(self, qkv_TC: torch.Tensor, segments: CuSeqlens) -> torch.Tensor:
        """The causal convolution and its SiLU, each segment alone."""
        return causal_conv1d(qkv_TC, self.conv_CW, cu_seqlens=segments)[0]

    def rule_inputs(
        self, qkv_TC: torch.Tensor, b_TU: torch.Tensor, a_TU: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """q_THK, k_THK, v_TUV, g_TU, beta_TU of the gated delta rule."""
        q_TC, k_TC, v_TC = torch.split(qkv_TC, self.channels, dim=-1)
        g_TU, beta_TU = delta_gates(a_TU, b_TU, self.a_log_U, self.dt_bias_U)
        keys, values = (-1, self.key_heads, self.key_dim), (-1, self.value_heads, self.value_dim)
        return q_TC.view(keys), k_TC.view(keys), v_TC.view(values), g_TU, beta_TU


def context_delta(
    qkv_TC: torch.Tensor,
    b_TU: torch.Tensor,
    a_TU: torch.Tensor,
    heads: DeltaHeads,
    layout: PackedLayout,
    *,
    way: DeltaWay,
    group: Any,
) -> torch.Tensor:
    """o_TUV for this rank's tokens; state and convolution start afresh in each sample.

    Args:
        qkv_TC: before the convolution.
        b_TU: before the sigmoid.
        a_TU: the decay's input.
        heads: all heads that these are of.
        layout: the row and this rank's part of it.
        way: how the ranks share the work; "heads" needs key and value heads to be multiples of the ranks.
        group: the context-parallel ranks.
    """
    if layout.context_size == 1:
        return _whole_row(heads, layout, qkv_TC, b_TU, a_TU)
    if way == "heads":
        return _over_heads(qkv_TC, b_TU, a_TU, heads, layout, group)
    return _over_pieces(qkv_TC, b_TU, a_TU, heads, layout, group)


def _whole_row(
    heads: DeltaHeads, layout: PackedLayout, qkv_TC: torch.Tensor, b_TU: torch.Tensor, a_TU: torch.Tensor
) -> torch.Tensor:
    inputs = heads.rule_inputs(heads.convolve(qkv_TC, layout.cu_seqlens), b_TU, a_TU)
    return gated_delta_rule(*inputs, cu_seqlens=layout.cu_seqlens)[0]


def _over_heads(
    qkv_TC: torch.Tensor,
    b_TU: torch.Tensor,
    a_TU: torch.Tensor,
    heads: DeltaHeads,
    layout: PackedLayout,
    group: Any,
) -> torch.Tensor:
    q_TC, k_TC, v_TC = torch.split(qkv_TC, heads.channels, dim=-1)
    parts = [x.unsqueeze(-1) for x in (q_TC, k_TC, v_TC, b_TU, a_TU)]
    row_TP = spread_heads(parts, layout, group)
    mine = heads.share(group.rank(), group.size())
    own = torch.split(row_TP, [sum(mine.channels), mine.value_heads, mine.value_heads], dim=-1)
    return join_heads(_whole_row(mine, layout, *own), layout, group)


def _over_pieces(
    qkv_TC: torch.Tensor,
    b_TU: torch.Tensor,
    a_TU: torch.Tensor,
    heads: DeltaHeads,
    layout: PackedLayout,
    group: Any,
) -> torch.Tensor:
    before = heads.conv_CW.shape[-1] - 1
    there, back = layout.table(
        ("routes", before, qkv_TC.device), lambda: _routes(layout, before, qkv_TC.device)
    )
    piece = pieces_of(layout)[layout.context_rank]
    halo = min(before, piece.carried)
    own_TP = exchange(torch.cat([qkv_TC, b_TU, a_TU], dim=-1), there, group)
    qkv_TC, b_TU, a_TU = torch.split(
        own_TP, [sum(heads.channels), heads.value_heads, heads.value_heads], dim=-1
    )
    # The tokens before the piece lengthen its first segment; what the convolution gives for them is dropped.
    segments = layout.table(
        ("piece with halo", before),
        lambda: CuSeqlens.from_lengths((halo + piece.lengths[0], *piece.lengths[1:])),
    )
    qkv_TC = heads.convolve(qkv_TC, segments)
    inputs = heads.rule_inputs(qkv_TC[halo:], b_TU[halo:], a_TU[halo:])
    return exchange(scan_piece(layout, group, *inputs), back, group)


def _routes(layout: PackedLayout, before: int, device: torch.device) -> tuple[Route, Route]:
    """From the zigzag order to pieces with up to `before` tokens ahead of them, and from pieces back."""
    size, rank, pieces = layout.context_size, layout.context_rank, pieces_of(layout)
    zigzag: list[Ranges] = [zigzag_ranges(layout.padded_total, size, other) for other in range(size)]
    halos: list[Ranges] = [[(piece.start - min(before, piece.carried), piece.stop)] for piece in pieces]
    exact: list[Ranges] = [[(piece.start, piece.stop)] for piece in pieces]
    return Route.plan(zigzag, halos, rank, device), Route.plan(exact, zigzag, rank, device)
