"""`VisionTower`: the vision transformer of Qwen3.5, whole on every rank of the first pipeline stage.

Axes: P patches of all pictures of a row, back to back; F numbers of a patch; V features of the tower, H its
heads, E features of a head; R rotated features; M tokens that the pictures become, D the text model's hidden.

Formulas: transformers' `Qwen3_5VisionModel`. Frames of a picture do not see one another.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from relax_kernels import CuSeqlens, attention, rotary, rotary_cos_sin, upload
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from relax_core.model.vision.config import VisionConfig
from relax_core.model.vision.places import Grid, corner_weights, patch_places

_EPS = 1e-6
_ROPE_BASE = 10000.0


class PatchProjection(nn.Module):
    """A patch of numbers to features.

    The weight keeps the shape of the convolution that it is in Hugging Face checkpoints, whose stride is its
    width.
    """

    def __init__(self, vision: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vision.hidden_size, *vision.patch_shape, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(vision.hidden_size, dtype=dtype))

    def forward(self, patches_PF: Tensor) -> Tensor:
        """[P, F] -> [P, V]."""
        return F.linear(patches_PF, self.weight.flatten(1), self.bias)


class VisionAttention(nn.Module):
    """Attention of a frame's patches to all of the same frame."""

    def __init__(self, vision: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = vision.heads
        self.qkv = nn.Linear(vision.hidden_size, 3 * vision.hidden_size, dtype=dtype)
        self.proj = nn.Linear(vision.hidden_size, vision.hidden_size, dtype=dtype)

    def forward(self, x_PV: Tensor, frames: CuSeqlens, cos_PR: Tensor, sin_PR: Tensor) -> Tensor:
        """[P, V] -> [P, V]."""
        q_PHE, k_PHE, v_PHE = self.qkv(x_PV).view(len(x_PV), 3, self.heads, -1).unbind(1)
        q_PHE, k_PHE = rotary(q_PHE, cos_PR, sin_PR), rotary(k_PHE, cos_PR, sin_PR)
        o_PHE = cast(Tensor, attention(q_PHE, k_PHE, v_PHE, cu_seqlens_q=frames, causal=False))
        return cast(Tensor, self.proj(o_PHE.flatten(1)))


class VisionMLP(nn.Module):
    """The feed-forward of a block."""

    def __init__(self, vision: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(vision.hidden_size, vision.ffn_size, dtype=dtype)
        self.linear_fc2 = nn.Linear(vision.ffn_size, vision.hidden_size, dtype=dtype)

    def forward(self, x_PV: Tensor) -> Tensor:
        """[P, V] -> [P, V]."""
        return cast(Tensor, self.linear_fc2(F.gelu(self.linear_fc1(x_PV), approximate="tanh")))


class VisionBlock(nn.Module):
    """One layer of the tower."""

    def __init__(self, vision: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(vision.hidden_size, eps=_EPS, dtype=dtype)
        self.norm2 = nn.LayerNorm(vision.hidden_size, eps=_EPS, dtype=dtype)
        self.attn = VisionAttention(vision, dtype)
        self.mlp = VisionMLP(vision, dtype)

    def forward(self, x_PV: Tensor, frames: CuSeqlens, cos_PR: Tensor, sin_PR: Tensor) -> Tensor:
        """[P, V] -> [P, V]."""
        x_PV = x_PV + self.attn(self.norm1(x_PV), frames, cos_PR, sin_PR)
        return x_PV + cast(Tensor, self.mlp(self.norm2(x_PV)))


class PatchMerger(nn.Module):
    """Makes one token of merge x merge neighbouring patches."""

    def __init__(self, vision: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.joined = vision.hidden_size * vision.merge**2
        self.norm = nn.LayerNorm(vision.hidden_size, eps=_EPS, dtype=dtype)
        self.linear_fc1 = nn.Linear(self.joined, self.joined, dtype=dtype)
        self.linear_fc2 = nn.Linear(self.joined, vision.out_size, dtype=dtype)

    def forward(self, x_PV: Tensor) -> Tensor:
        """[P, V] -> [M, D]."""
        joined = self.norm(x_PV).view(-1, self.joined)
        return cast(Tensor, self.linear_fc2(F.gelu(self.linear_fc1(joined))))


class VisionTower(nn.Module):
    """Pictures to features of tokens.

    Every rank computes all pictures of its row. Where ranks hold different tokens of a row, each has the part
    of the gradient that its own tokens give: over tensor-parallel ranks with sequence parallelism the weights
    are marked, so that Megatron sums them; over context- and data-parallel ranks it always does.

    Args:
        config: Megatron's config.
        vision: sizes.
    """

    def __init__(self, config: TransformerConfig, vision: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vision = vision
        dtype = config.params_dtype
        self.patch_embed = nn.ModuleDict({"proj": PatchProjection(vision, dtype)})
        self.pos_embed = nn.Embedding(vision.side**2, vision.hidden_size, dtype=dtype)
        self.blocks = nn.ModuleList(VisionBlock(vision, dtype) for _ in range(vision.depth))
        self.merger = PatchMerger(vision, dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            if parameter.dim() > 1:
                config.init_method(parameter.detach())

    @property
    def trained(self) -> bool:
        """Whether its weights take a gradient."""
        return self.pos_embed.weight.requires_grad

    def forward(self, patches_PF: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[P, F] patches of any float dtype, in the order of `patch_places` -> features [M, D]."""
        vision, device = self.vision, patches_PF.device
        projection = self.patch_embed["proj"]
        dtype = cast(torch.dtype, projection.weight.dtype)
        x_PV = projection(patches_PF.to(dtype)) + self._positions(grids, device).to(dtype)
        cos_PR, sin_PR = self._angles(grids, device)
        frames = CuSeqlens.from_lengths([rows * cols for count, rows, cols in grids for _ in range(count)])
        again = self.training and self.config.recompute_granularity == "full" and torch.is_grad_enabled()
        for block in self.blocks:
            inputs = (x_PV, frames, cos_PR, sin_PR)
            x_PV = checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)
        assert len(x_PV) % vision.merge**2 == 0
        return cast(Tensor, self.merger(x_PV))

    def nothing(self) -> Tensor:
        """A scalar 0 that gives every weight a gradient of 0: a row without pictures still has all gradients
        that data-parallel ranks wait for."""
        weights = [parameter.flatten()[0] for parameter in self.parameters()]
        return torch.stack(weights).sum() * 0

    def _positions(self, grids: Sequence[Grid], device: torch.device) -> Tensor:
        """Interpolated learned positions [P, V], at least float32."""
        index_4P, weight_4P = corner_weights(grids, self.vision.merge, self.vision.side)
        corners_4PV = self.pos_embed(upload(index_4P, device))
        return cast(Tensor, (corners_4PV * upload(weight_4P, device)[:, :, None]).sum(0))

    def _angles(self, grids: Sequence[Grid], device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [P, E]: the first half of a head's feature pairs turns by the row, the second by the
        column."""
        place_P2 = upload(patch_places(grids, self.vision.merge), device)
        width = self.vision.hidden_size // self.vision.heads
        pairs = width // 4
        parts = [
            rotary_cos_sin(place_P2[:, axis].contiguous(), dim=width // 2, base=_ROPE_BASE) for axis in (0, 1)
        ]
        cos, sin = (torch.cat([part[i][:, :pairs] for part in parts], dim=1) for i in (0, 1))
        return torch.cat([cos, cos], dim=1), torch.cat([sin, sin], dim=1)
