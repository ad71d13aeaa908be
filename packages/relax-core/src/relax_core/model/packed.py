"""What every layer needs to know of the packed micro-batch, handed through Megatron's block unchanged.

Axes: T packed positions of this rank, R rotated features of a head.
"""

from dataclasses import dataclass
from typing import cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from relax_kernels import rotary_cos_sin, upload

from relax_core.model.balance import RoutingPass
from relax_core.packing import PackedLayout


@dataclass
class PackedContext(PackedSeqParams):  # type: ignore[misc]
    """Layout, rotary angles and the routing record of one micro-batch.

    `ahead` is 0 in the trunk and k + 1 in draft depth k, whichever layer serves it.

    A `PackedSeqParams` so that Megatron's `TransformerBlock` passes it on, also when it recomputes a layer.
    """

    layout: PackedLayout | None = None
    cos_TR: torch.Tensor | None = None
    sin_TR: torch.Tensor | None = None
    routing: RoutingPass | None = None
    ahead: int = 0

    @classmethod
    def build(
        cls,
        layout: PackedLayout,
        *,
        device: torch.device,
        rotary_dim: int,
        rope_base: float,
        routing: RoutingPass | None = None,
        positions_3T: torch.Tensor | None = None,
        sections: tuple[int, int, int] | None = None,
    ) -> "PackedContext":
        """The context of `layout`; the angles of this rank's part are float32 [T, rotary_dim] on `device`.

        `positions_3T` of the whole row and the `sections` of feature pairs that they turn take the place of
        the layout's own positions in a row with pictures.
        """
        if positions_3T is None:
            positions, sections = layout.local(layout.position_ids_T), None
        else:
            positions = layout.local(positions_3T.T).T.contiguous()
        cos_TR, sin_TR = rotary_cos_sin(
            upload(positions, device), dim=rotary_dim, base=rope_base, sections=sections
        )
        return cls(qkv_format="thd", layout=layout, cos_TR=cos_TR, sin_TR=sin_TR, routing=routing)


def require_packed(params: PackedSeqParams | None) -> tuple[PackedLayout, torch.Tensor, torch.Tensor]:
    """(layout, cos_TR, sin_TR) of a layer's `packed_seq_params`.

    Raises:
        TypeError: the layer was called without a `PackedContext`.
    """
    if not isinstance(params, PackedContext):
        raise TypeError(f"packed_seq_params must be a PackedContext, not {type(params).__name__}")
    return (
        cast(PackedLayout, params.layout),
        cast(torch.Tensor, params.cos_TR),
        cast(torch.Tensor, params.sin_TR),
    )
