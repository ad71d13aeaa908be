"""Wrong denominators, and a draft loss that reaches too far."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from relax_core.loss import LossReducer
from relax_core.model import Qwen35Model
from relax_core.testing.row import Row


@contextmanager
def divided_by_context(row: Row) -> Iterator[None]:
    """Megatron-LM averages over ranks that share a row."""
    share = LossReducer._share
    size = row.parallel.get("context", 1)
    with patch.object(LossReducer, "_share", lambda self, term: share(self, term) / size):
        yield


@contextmanager
def draft_count_of_own_piece(row: Row) -> Iterator[None]:
    """Each rank divides its draft loss by the tokens that it holds itself."""
    share = LossReducer._share
    ranks = row.ranks // (row.parallel.get("tensor", 1) * row.parallel.get("pipeline", 1))

    def local(self: Any, term: Any) -> torch.Tensor:
        if not term.name.startswith("mtp_loss"):
            return share(self, term)
        counted = float(term.weight_T.sum()) * ranks
        return share(LossReducer({term.name: counted}), term)

    with patch.object(LossReducer, "_share", local):
        yield


@contextmanager
def draft_embedding_not_detached(row: Row) -> Iterator[None]:
    """The draft layers train the embedding although that was not asked for."""
    init = Qwen35Model.__init__

    def joined(self: Any, *args: Any, mtp: Any, **options: Any) -> None:
        init(self, *args, mtp=mtp.model_copy(update={"detach_embedding": False}), **options)

    with patch.object(Qwen35Model, "__init__", joined):
        yield
