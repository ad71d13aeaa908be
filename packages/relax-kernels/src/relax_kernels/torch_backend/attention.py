"""Packed softmax attention tile by tile, with a hand-written backward pass that computes the scores again.

T query tokens, S key tokens, H query heads, G key/value heads, R = H / G query heads per key head, D head
dim, E value dim; B sequences, I queries and J keys of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.torch_backend.attention_tiles import Tile, tiles_of
from relax_kernels.torch_backend.typed import accumulation_dtype, apply


def attention(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGE: torch.Tensor,
    *,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    causal: bool,
    scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `relax_kernels.attention`."""
    tiles = tiles_of(cu_seqlens_q, cu_seqlens_k, q_THD.shape[1], causal, q_THD.device)
    o_THE, lse_TH = apply(_Attention, q_THD, k_SGD, v_SGE, tiles, scale)
    return o_THE, lse_TH if return_lse else None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_SGD: torch.Tensor,
        v_SGE: torch.Tensor,
        tiles: tuple[Tile, ...],
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        working = accumulation_dtype(q_THD.dtype)
        q, k, v = q_THD.to(working) * scale, k_SGD.to(working), v_SGE.to(working)
        o_THE, lse_TH = q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_full(q.shape[:2], -torch.inf)
        for tile in tiles:
            scores_BGRIJ = _scores(q, k, tile)
            p_BGRIJ = torch.softmax(scores_BGRIJ, -1)
            o_BGRIE = _mm(p_BGRIJ.flatten(2, 3), _keys(v, tile)).view(*p_BGRIJ.shape[:4], -1)
            # The largest share is exp(largest score - lse), and never rounds to 0.
            lse_BGRI = scores_BGRIJ.amax(-1) - p_BGRIJ.amax(-1).log()
            _put_queries(o_THE, o_BGRIE, tile)
            _put_queries(lse_TH, lse_BGRI, tile)
            if tile.blind_row is not None:
                o_THE[tile.blind_row] = 0.0
                lse_TH[tile.blind_row] = -torch.inf
        ctx.save_for_backward(q_THD, k_SGD, v_SGE, o_THE, lse_TH)
        ctx.tiles, ctx.scale = tiles, scale
        return o_THE.to(q_THD.dtype), lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THE: torch.Tensor, dlse_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_SGD, v_SGE, o_THE, lse_TH = ctx.saved_tensors
        working = lse_TH.dtype
        q, k, v = q_THD.to(working) * ctx.scale, k_SGD.to(working), v_SGE.to(working)
        do = do_THE.to(working)
        slack_TH = (do * o_THE).sum(-1) - dlse_TH
        # Infinity makes every share of a query 0: of one that sees nothing here, of an empty place below.
        lse_TH = lse_TH.masked_fill(lse_TH == -torch.inf, torch.inf)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        groups = k.shape[1]
        for tile in ctx.tiles:
            lse_BGRI = _queries(lse_TH, tile, groups)
            if tile.empty_BI is not None:
                lse_BGRI.masked_fill_(tile.empty_BI[:, None, None], torch.inf)
            p_BGRIJ = _scores(q, k, tile).sub_(lse_BGRI.unsqueeze(-1)).exp_()
            p, do_tile = p_BGRIJ.flatten(2, 3), _queries(do, tile, groups).flatten(2, 3)
            tile.keys.add(dv, _mm(p.mT, do_tile).transpose(1, 2))
            ds_BGRIJ = _mm(do_tile, _keys(v, tile).mT).view_as(p_BGRIJ)
            ds_BGRIJ.sub_(_queries(slack_TH, tile, groups).unsqueeze(-1)).mul_(p_BGRIJ)
            ds = ds_BGRIJ.flatten(2, 3)
            tile.keys.add(dk, _mm(ds.mT, _queries(q, tile, groups).flatten(2, 3)).transpose(1, 2))
            _put_queries(dq, _mm(ds, _keys(k, tile)).view(*p_BGRIJ.shape[:4], -1), tile)
        return dq.mul_(ctx.scale).to(q_THD.dtype), dk.to(k_SGD.dtype), dv.to(v_SGE.dtype), None, None


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(*a.shape[:2], a.shape[-2], b.shape[-1])


def _scores(q_THD: torch.Tensor, k_SGD: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Scores [B, G, R, I, J] of scaled queries; minus infinity where a query does not see a key."""
    q_BGRID = _queries(q_THD, tile, k_SGD.shape[1])
    scores = _mm(q_BGRID.flatten(2, 3), _keys(k_SGD, tile).mT).view(*q_BGRID.shape[:4], -1)
    mask = tile.mask_B11IJ()
    if mask is not None:
        scores[..., tile.seen_by_all :].masked_fill_(mask, -torch.inf)
    return scores


def _queries(x_TH: torch.Tensor, tile: Tile, groups: int) -> torch.Tensor:
    """[T, H, ...] to [B, G, R, I, ...]."""
    x_BIH = tile.queries.take(x_TH)
    B, queries, H, *rest = x_BIH.shape
    return x_BIH.reshape(B, queries, groups, H // groups, *rest).movedim(1, 3).contiguous()


def _put_queries(x_TH: torch.Tensor, x_BGRI: torch.Tensor, tile: Tile) -> None:
    tile.queries.put(x_TH, x_BGRI.movedim(3, 1).flatten(2, 3))


def _keys(x_SG: torch.Tensor, tile: Tile) -> torch.Tensor:
    """[S, G, ...] to [B, G, J, ...]."""
    return tile.keys.take(x_SG).transpose(1, 2).contiguous()
