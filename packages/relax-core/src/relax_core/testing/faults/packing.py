"""Rows, segments and labels in the wrong places."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from relax_bridge.partition import Component, Cut, Split
from relax_kernels import CuSeqlens, gated_delta_rule

from relax_core.model.context.delta import DeltaHeads
from relax_core.packing import PackedLayout
from relax_core.testing.row import Row
from relax_core.trainer.sample import Draft, _Row


@contextmanager
def fused_rows_cut_as_one_block(row: Row) -> Iterator[None]:
    """A rank takes consecutive rows of a fused matrix, where it should take its heads of q, of k, of v."""
    cut = Split.cut

    def block(self: Split, size: int, rank: int, ranks: int) -> Cut:
        names = {part.name for part in self.components}
        if {"q", "k", "v"} <= names:
            self = Split(self.axis, (Component("rows", size),))
        return cut(self, size, rank, ranks)

    with patch.object(Split, "cut", block):
        yield


@contextmanager
def draft_labels_of_the_next_sample(row: Row) -> Iterator[None]:
    """The token d places ahead is taken wherever it is."""

    def leaking(self: PackedLayout, distance: int, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        place_T = torch.arange(self.padded_total) + distance
        valid_T = place_T < self.total
        return place_T.where(valid_T, torch.tensor(0)).to(device), valid_T.to(device)

    with patch.object(PackedLayout, "ahead", leaking):
        yield


@contextmanager
def draft_labels_of_padding(row: Row) -> Iterator[None]:
    """The last tokens before the row's padding learn to predict the padding."""
    draft, ahead = _Row.draft, PackedLayout.ahead

    def over_the_end(
        self: PackedLayout, distance: int, device: Any = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index_T, valid_T = ahead(self, distance)
        place_T = torch.arange(self.padded_total) + distance
        padding_T = (
            (place_T >= self.total) & (place_T < self.padded_total) & (place_T < self.total + distance)
        )
        return place_T.where(padding_T, index_T).to(device), (valid_T | padding_T).to(device)

    def padded(self: _Row, depth: int, device: torch.device) -> Draft:
        mask_T = self.mask_T.clone()
        mask_T[self.layout.total :] = 1
        with patch.object(PackedLayout, "ahead", over_the_end):
            return draft(replace(self, mask_T=mask_T), depth, device)

    with patch.object(_Row, "draft", padded):
        yield


@contextmanager
def convolution_of_the_whole_row(row: Row) -> Iterator[None]:
    """The convolution looks back over the beginning of a sample."""
    convolve = DeltaHeads.convolve

    def joined(self: DeltaHeads, qkv_TC: torch.Tensor, segments: CuSeqlens) -> torch.Tensor:
        return convolve(self, qkv_TC, CuSeqlens.from_lengths((segments.total,)))

    with patch.object(DeltaHeads, "convolve", joined):
        yield


@contextmanager
def state_of_the_whole_row(row: Row) -> Iterator[None]:
    """The state is not reset where a sample begins."""

    def joined(*args: Any, cu_seqlens: CuSeqlens, **options: Any) -> Any:
        return gated_delta_rule(*args, cu_seqlens=CuSeqlens.from_lengths((cu_seqlens.total,)), **options)

    with patch("relax_core.model.context.delta.gated_delta_rule", joined):
        yield
