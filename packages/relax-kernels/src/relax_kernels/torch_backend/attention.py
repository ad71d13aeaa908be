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
        q, k, v = q_THD.to(working), k_SGD.to(working), v_SGE.to(working)
        T, H, _ = q.shape
        o_THE, lse_TH = q.new_zeros(T, H, v.shape[-1]), q.new_full((T, H), -torch.inf)
        for tile in tiles:
            v_BGJE = _keys(v, tile)
            scores_BGRIJ = _scores(q, k, tile, scale)
            largest = scores_BGRIJ.amax(-1, keepdim=True).clamp_(min=torch.finfo(working).min)
            p_BGRIJ = scores_BGRIJ.sub_(largest).exp_()
            total = p_BGRIJ.sum(-1, keepdim=True)
            o_BGRIE = _mm(p_BGRIJ.flatten(2, 3), v_BGJE).view(*p_BGRIJ.shape[:4], -1)
            o_BGRIE /= torch.where(total > 0, total, 1.0)
            _put_queries(o_THE, o_BGRIE, tile)
            _put_queries(lse_TH, torch.where(total > 0, total.log() + largest, -torch.inf)[..., 0], tile)
        ctx.save_for_backward(q_THD, k_SGD, v_SGE, o_THE, lse_TH)
        ctx.tiles, ctx.scale = tiles, scale
        return o_THE.to(q_THD.dtype), lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THE: torch.Tensor, dlse_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_SGD, v_SGE, o_THE, lse_TH = ctx.saved_tensors
        working = lse_TH.dtype
        q, k, v, do_THE = (x.to(working) for x in (q_THD, k_SGD, v_SGE, do_THE))
        slack_TH = (do_THE * o_THE).sum(-1) - dlse_TH
        lse_TH = lse_TH.masked_fill(lse_TH == -torch.inf, 0.0)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        groups = k.shape[1]
        for tile in ctx.tiles:
            p_BGRIJ = _scores(q, k, tile, ctx.scale).sub_(_queries(lse_TH, tile, groups).unsqueeze(-1)).exp_()
            do_BGRIE = _real_queries(do_THE, tile, groups)
            slack = _real_queries(slack_TH, tile, groups).unsqueeze(-1)
            p, do = p_BGRIJ.flatten(2, 3), do_BGRIE.flatten(2, 3)
            _add_keys(dv, _mm(p.mT, do), tile)
            ds_BGRIJ = _mm(do, _keys(v, tile).mT).view_as(p_BGRIJ).sub_(slack).mul_(p_BGRIJ).mul_(ctx.scale)
            ds = ds_BGRIJ.flatten(2, 3)
            _add_keys(dk, _mm(ds.mT, _queries(q, tile, groups).flatten(2, 3)), tile)
            _put_queries(dq, _mm(ds, _keys(k, tile)).view(*p_BGRIJ.shape[:4], -1), tile)
        return dq.to(q_THD.dtype), dk.to(k_SGD.dtype), dv.to(v_SGE.dtype), None, None


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(*a.shape[:2], a.shape[-2], b.shape[-1])


def _scores(q_THD: torch.Tensor, k_SGD: torch.Tensor, tile: Tile, scale: float) -> torch.Tensor:
    """Scaled scores [B, G, R, I, J]; minus infinity where a query does not see a key."""
    q_BGRID = _queries(q_THD, tile, k_SGD.shape[1])
    scores = _mm(q_BGRID.flatten(2, 3), _keys(k_SGD, tile).mT).mul_(scale).view(*q_BGRID.shape[:4], -1)
    mask = tile.mask_B11IJ()
    return scores if mask is None else scores.masked_fill_(mask, -torch.inf)


def _queries(x_TH: torch.Tensor, tile: Tile, groups: int) -> torch.Tensor:
    """[T, H, ...] to [B, G, R, I, ...]."""
    return _by_group(x_TH[tile.query_BI], groups)


def _real_queries(x_TH: torch.Tensor, tile: Tile, groups: int) -> torch.Tensor:
    """As `_queries`, but 0 at places that hold no query."""
    x_BIH = x_TH.new_zeros(tile.query_BI.numel(), *x_TH.shape[1:])
    x_BIH.index_copy_(0, tile.query_place, x_TH[tile.query_row])
    return _by_group(x_BIH.view(*tile.query_BI.shape, *x_TH.shape[1:]), groups)


def _by_group(x_BIH: torch.Tensor, groups: int) -> torch.Tensor:
    B, queries, H, *rest = x_BIH.shape
    return x_BIH.view(B, queries, groups, H // groups, *rest).movedim(1, 3).contiguous()


def _put_queries(x_TH: torch.Tensor, x_BGRI: torch.Tensor, tile: Tile) -> None:
    x_BIH = x_BGRI.movedim(3, 1).flatten(2, 3).flatten(0, 1)
    x_TH[tile.query_row] = x_BIH[tile.query_place]


def _keys(x_SG: torch.Tensor, tile: Tile) -> torch.Tensor:
    """[S, G, ...] to [B, G, J, ...]."""
    return x_SG[tile.key_BJ].transpose(1, 2).contiguous()


def _add_keys(x_SG: torch.Tensor, x_BGJ: torch.Tensor, tile: Tile) -> None:
    x_BJG = x_BGJ.transpose(1, 2).flatten(0, 1)
    x_SG.index_add_(0, tile.key_row, x_BJG[tile.key_place])
