"""Packing: how samples of different lengths share one row, and which samples share one micro-batch.

`PackedLayout` is imported on first use: planning micro-batches needs no torch.
"""

from typing import TYPE_CHECKING

from relax_core.lazy import lazy_names
from relax_core.packing.schedule import SampleCost, plan_micro_batches

if TYPE_CHECKING:
    from relax_core.packing.layout import PackedLayout

__all__ = ["PackedLayout", "SampleCost", "plan_micro_batches"]

__getattr__ = lazy_names(__name__, {"PackedLayout": "layout"})
