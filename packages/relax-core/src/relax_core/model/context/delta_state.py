"""The gated delta rule over a row whose contiguous pieces lie on successive ranks.

Axes: T tokens of this rank's piece, F the first of them that belong to a sample begun on an earlier rank, H
key heads, U value heads, K key dim, V value dim, E = ceil(K / V) heads that carry a K x K matrix.

Over a stretch of tokens the rule is affine in the state that enters: S_out = A S_in + B, and each output
is o = o_0 + p S_in, with p = scale q^T A (up to that token). Ranks therefore scan at the same time: with a
zero state for o_0 and B, and, for tokens whose sample began earlier, with the identity and zero values for p
and A. (A, B) of every piece are gathered, which are a few matrices per head whatever the length, and each
rank folds those of the ranks before it. Source: the recurrence of Yang et al., Gated Delta Networks, arXiv
2412.06464, read as a linear map of the state.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from relax_kernels import CuSeqlens, gated_delta_rule
from torch.autograd.function import once_differentiable

from relax_core.packing import PackedLayout
from relax_core.packing.zigzag import Piece, contiguous_range


def pieces_of(layout: PackedLayout) -> list[Piece]:
    """The contiguous piece of every rank."""

    def build() -> list[Piece]:
        size = layout.context_size
        ranges = (contiguous_range(layout.padded_total, size, rank) for rank in range(size))
        return [Piece.cut(layout.cu_seqlens, *ends) for ends in ranges]

    return layout.table(("contiguous pieces",), build)


def scan_piece(
    layout: PackedLayout,
    group: Any,
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
) -> torch.Tensor:
    """`relax_kernels.gated_delta_rule` of this rank's contiguous piece, with the states of the ranks before.

    Args:
        layout: the row.
        group: the context-parallel ranks.
        q_THK, k_THK, v_TUV, g_TU, beta_TU: as the operator takes them, for the tokens of the piece.

    Returns:
        o_TUV.
    """
    pieces = pieces_of(layout)
    piece = pieces[layout.context_rank]
    inputs = (q_THK, k_THK, v_TUV, g_TU, beta_TU)
    first = piece.lengths[0] if piece.carried else 0
    outputs, seen_FUK, summary = [], None, None
    if first:
        lengths = layout.table(("carried segment",), lambda: CuSeqlens.from_lengths((first,)))
        o_FUV, seen_FUK, summary = _scan_affine(lengths, *(x[:first] for x in inputs))
        outputs.append(o_FUV)
    others = piece.lengths[1:] if first else piece.lengths
    if others:
        lengths = layout.table(("own segments",), lambda: CuSeqlens.from_lengths(others))
        o_TUV, state_NUKV = gated_delta_rule(
            *(x[first:] for x in inputs), cu_seqlens=lengths, output_final_state=piece.goes_on
        )
        outputs.append(o_TUV)
        if state_NUKV is not None:
            # Nothing that entered reaches the end: what leaves is B alone, behind an A of zeros.
            summary = F.pad(state_NUKV[-1], (k_THK.shape[-1], 0))
    o_TUV = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if not any(each.goes_on for each in pieces):
        return o_TUV
    if summary is None:
        summary = _no_summary(v_TUV, k_THK.shape[-1])
    gathered_RUKS, o_TUV = _GatherStates.apply(summary, o_TUV, group)  # type: ignore[no-untyped-call]
    if seen_FUK is None:
        return cast(torch.Tensor, o_TUV)
    began = (piece.start - piece.carried) // (piece.stop - piece.start)
    state_UKV = _fold(gathered_RUKS[began : layout.context_rank], k_THK.shape[-1])
    more_UFV = seen_FUK.transpose(0, 1) @ state_UKV.to(seen_FUK.dtype)
    return torch.cat([o_TUV[:first] + more_UFV.transpose(0, 1), o_TUV[first:]])


def _scan_affine(
    lengths: CuSeqlens,
    q_FHK: torch.Tensor,
    k_FHK: torch.Tensor,
    v_FUV: torch.Tensor,
    g_FU: torch.Tensor,
    beta_FU: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o_0 [F, U, V], p [F, U, K], [A; B] [U, K, K + V]) of one stretch, by one scan.

    Next to every value head stand E heads with the same keys, decay and step size: their values are zero,
    their initial states the columns of the identity, V at a time.
    """
    tokens, heads, width = v_FUV.shape
    keys = k_FHK.shape[-1]
    more = -(-keys // width)
    v_FUEV = F.pad(v_FUV.unsqueeze(2), (0, 0, 0, more))
    g_FUE, beta_FUE = (x.unsqueeze(-1).expand(-1, -1, 1 + more) for x in (g_FU, beta_FU))
    columns_KEV = torch.eye(keys, more * width, dtype=g_FU.dtype, device=g_FU.device).view(keys, more, width)
    initial_UEKV = F.pad(columns_KEV.transpose(0, 1), (0, 0, 0, 0, 1, 0)).expand(heads, -1, -1, -1)
    o_FUV, state_NUKV = gated_delta_rule(
        q_FHK,
        k_FHK,
        v_FUEV.flatten(1, 2),
        g_FUE.flatten(1, 2),
        beta_FUE.flatten(1, 2),
        cu_seqlens=lengths,
        initial_state_NUKV=initial_UEKV.flatten(0, 1).unsqueeze(0),
        output_final_state=True,
    )
    o_FUEV = o_FUV.view(tokens, heads, 1 + more, width)
    state_UEKV = cast(torch.Tensor, state_NUKV).view(heads, 1 + more, keys, width)
    a_UKK = state_UEKV[:, 1:].transpose(1, 2).flatten(2)[..., :keys]
    return (
        o_FUEV[:, :, 0],
        o_FUEV[:, :, 1:].flatten(2)[..., :keys],
        torch.cat([a_UKK, state_UEKV[:, 0]], dim=-1),
    )


def _fold(summaries_RUKS: torch.Tensor, keys: int) -> torch.Tensor:
    """The state [U, K, V] after the pieces of some ranks, the sample having begun on the first of them."""
    state_UKV = summaries_RUKS[0, ..., keys:]
    for summary_UKS in summaries_RUKS[1:]:
        state_UKV = summary_UKS[..., :keys] @ state_UKV + summary_UKS[..., keys:]
    return state_UKV


def _no_summary(v_TUV: torch.Tensor, keys: int) -> torch.Tensor:
    _, heads, width = v_TUV.shape
    dtype = torch.promote_types(v_TUV.dtype, torch.float32)
    return torch.zeros(heads, keys, keys + width, dtype=dtype, device=v_TUV.device)


class _GatherStates(torch.autograd.Function):
    """Gathers the ranks' summaries; the output rides along.

    Some ranks send nothing that needs a gradient, some use nothing of what they receive; the backward pass
    is a collective all the same. The output passes through on every rank, so that every rank takes part.
    """

    @staticmethod
    def forward(
        ctx: Any, summary_UKS: torch.Tensor, o_TUV: torch.Tensor, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.group = group
        ranks = group.size()
        gathered = summary_UKS.new_empty(ranks * len(summary_UKS), *summary_UKS.shape[1:])
        dist.all_gather_into_tensor(gathered, summary_UKS.contiguous(), group=group)
        return gathered.view(ranks, *summary_UKS.shape), o_TUV.view_as(o_TUV)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_RUKS: torch.Tensor, grad_TUV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        grad_UKS = torch.empty_like(grad_RUKS[0])
        dist.reduce_scatter_tensor(grad_UKS, grad_RUKS.flatten(0, 1).contiguous(), group=ctx.group)
        return grad_UKS, grad_TUV, None
