"""Numbers of whole completions, and of adapters, taken from one rank's part."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from relax_core.algorithms import Sequences
from relax_core.model.linear import Adapted
from relax_core.testing.row import Row


@contextmanager
def ratio_of_own_piece(row: Row) -> Iterator[None]:
    """Each rank takes the ratio of a completion from the tokens that it holds itself."""
    init = Sequences.__init__

    def alone(self: Any, index_T: torch.Tensor, count: int, add_over_context: Any = None) -> None:
        init(self, index_T, count)

    with patch.object(Sequences, "__init__", alone):
        yield


@contextmanager
def adapter_of_tokens_not_summed(row: Row) -> Iterator[None]:
    """An adapter's whole matrix keeps the gradient of the tokens of its own rank."""
    make = Adapted.make_adapter

    def unmarked(self: Any, *args: Any) -> None:
        make(self, *args)
        for matrix in (self.lora_A, self.lora_B):
            # Neither is marked, whatever is said of them later.
            matrix.__class__ = _Unmarked

    with patch.object(Adapted, "make_adapter", unmarked):
        yield


class _Unmarked(torch.nn.Parameter):
    """A parameter that is never marked as partial."""

    sequence_parallel = property(lambda self: False, lambda self, value: None)
