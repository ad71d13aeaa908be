"""Packing: how samples of different lengths share one row, and which samples share one micro-batch."""

from relax_core.packing.layout import PackedLayout
from relax_core.packing.schedule import SampleCost, plan_micro_batches

__all__ = ["PackedLayout", "SampleCost", "plan_micro_batches"]
