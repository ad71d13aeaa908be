"""Faults that others had, put into this trainer: what shows that the comparison of layouts would see them.

Each is a context in which the trainer is wrong in one place, as Megatron-LM or an RL framework was.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from relax_bridge.partition import Component, Cut, Split

from relax_core.algorithms import Sequences
from relax_core.device import World
from relax_core.loss import LossReducer
from relax_core.model import Qwen35Model
from relax_core.model.norm import RMSNorm, _NormWeight
from relax_core.packing import PackedLayout
from relax_core.testing.row import Row
from relax_core.testing.training import Measured, train


def train_with_fault(row: Row, world: World, *, fault: str) -> Measured | None:
    """`train` with one of `FAULTS`."""
    with FAULTS[fault](row):
        return train(row, world)


@contextmanager
def _loss_divided_by_context(row: Row) -> Iterator[None]:
    share = LossReducer._share
    size = row.parallel.get("context", 1)
    with patch.object(LossReducer, "_share", lambda self, term: share(self, term) / size):
        yield


@contextmanager
def _draft_count_of_own_piece(row: Row) -> Iterator[None]:
    share = LossReducer._share

    def local(self: Any, term: Any) -> torch.Tensor:
        if not term.name.startswith("mtp_loss"):
            return share(self, term)
        counted = float(term.weight_T.sum()) * row.parallel.get("context", 1)
        return share(LossReducer({term.name: counted}), term)

    with patch.object(LossReducer, "_share", local):
        yield


@contextmanager
def _norm_of_heads_not_summed(row: Row) -> Iterator[None]:
    with patch.object(_NormWeight, "whole_weight", lambda self: self.weight):
        yield


@contextmanager
def _norm_of_tokens_not_summed(row: Row) -> Iterator[None]:
    init = RMSNorm.__init__

    def unmarked(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.weight.sequence_parallel = False

    with patch.object(RMSNorm, "__init__", unmarked):
        yield


@contextmanager
def _copies_of_the_embedding_not_summed(row: Row) -> Iterator[None]:
    target = "megatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads"
    with patch(target, lambda *args, **options: None):
        yield


@contextmanager
def _fused_rows_cut_as_one_block(row: Row) -> Iterator[None]:
    cut = Split.cut

    def block(self: Split, size: int, rank: int, ranks: int) -> Cut:
        names = {part.name for part in self.components}
        if {"q", "k", "v"} <= names:
            self = Split(self.axis, (Component("rows", size),))
        return cut(self, size, rank, ranks)

    with patch.object(Split, "cut", block):
        yield


@contextmanager
def _draft_labels_of_the_next_sample(row: Row) -> Iterator[None]:
    def leaking(self: PackedLayout, distance: int, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        place_T = torch.arange(self.padded_total) + distance
        valid_T = place_T < self.total
        return place_T.where(valid_T, torch.tensor(0)).to(device), valid_T.to(device)

    with patch.object(PackedLayout, "ahead", leaking):
        yield


@contextmanager
def _draft_embedding_not_detached(row: Row) -> Iterator[None]:
    init = Qwen35Model.__init__

    def joined(self: Any, *args: Any, mtp: Any, **options: Any) -> None:
        init(self, *args, mtp=mtp.model_copy(update={"detach_embedding": False}), **options)

    with patch.object(Qwen35Model, "__init__", joined):
        yield


@contextmanager
def _ratio_of_own_piece(row: Row) -> Iterator[None]:
    init = Sequences.__init__

    def alone(self: Any, index_T: torch.Tensor, count: int, add_over_context: Any = None) -> None:
        init(self, index_T, count)

    with patch.object(Sequences, "__init__", alone):
        yield


FAULTS: Mapping[str, Callable[[Row], Any]] = {
    "the loss is divided by the context size": _loss_divided_by_context,
    "the draft loss counts the tokens of its own piece": _draft_count_of_own_piece,
    "a norm over spread heads keeps its partial gradient": _norm_of_heads_not_summed,
    "a norm over spread tokens keeps its partial gradient": _norm_of_tokens_not_summed,
    "the copies of the embedding keep their own gradients": _copies_of_the_embedding_not_summed,
    "fused rows are cut as one block": _fused_rows_cut_as_one_block,
    "draft labels leak from one sample into the next": _draft_labels_of_the_next_sample,
    "the draft loss reaches the embedding": _draft_embedding_not_detached,
    "the ratio of a completion counts the tokens of its own piece": _ratio_of_own_piece,
}
