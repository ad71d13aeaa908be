"""Gradients that stay a part of the sum, and a gradient norm that leaves some out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from relax_core.model.mtp import DraftLayer
from relax_core.model.norm import RMSNorm, _NormWeight
from relax_core.testing.row import Row


@contextmanager
def norm_of_heads_not_summed(row: Row) -> Iterator[None]:
    """The delta net's output norm is one weight for all heads, each rank sees its own heads."""
    with patch.object(_NormWeight, "whole_weight", lambda self: self.weight):
        yield


@contextmanager
def norm_of_tokens_not_summed(row: Row) -> Iterator[None]:
    """Under sequence parallelism each rank sees its own tokens."""
    init = RMSNorm.__init__

    def unmarked(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.weight.sequence_parallel = False

    with patch.object(RMSNorm, "__init__", unmarked):
        yield


@contextmanager
def copies_of_the_embedding_not_summed(row: Row) -> Iterator[None]:
    """First and last stage train their copies apart."""
    target = "megatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads"
    with patch(target, lambda *args, **options: None):
        yield


@contextmanager
def recomputed_from_another_rank(row: Row) -> Iterator[None]:
    """What a draft layer computes again starts from the tokens of its neighbour among the tensor ranks."""
    forward = DraftLayer._forward

    def swapped(self: Any, embedding_T1D: torch.Tensor, hidden_T1D: torch.Tensor, context: Any) -> Any:
        # The first pass of what will be computed again runs without gradients.
        if torch.is_grad_enabled():
            group = self.tp_group
            parts = [torch.empty_like(embedding_T1D) for _ in range(group.size())]
            dist.all_gather(parts, embedding_T1D.detach().contiguous(), group=group)
            embedding_T1D = parts[group.rank() - 1]
        return forward(self, embedding_T1D, hidden_T1D, context)

    with patch.object(DraftLayer, "_forward", swapped):
        yield


@contextmanager
def spread_weights_not_in_the_norm(row: Row) -> Iterator[None]:
    """Weights that are not marked as spread count on the first tensor rank alone."""
    with patch("relax_core.model.delta_net.set_tensor_model_parallel_attributes", lambda *args: None):
        yield
