"""`FeatureLink`: what the tower saw, sent from the first pipeline stage to the last.

Axes: M tokens of all pictures of a row, D hidden.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


class FeatureLink:
    """Between the first and the last stage, which has the draft layers; one object on each.

    Features travel in the group of the two stages that share the embedding, beside the hidden states, so that
    these and the features of several micro-batches cannot be taken for one another: in a group of its own
    every message is matched in order, and both stages meet micro-batches in the same order. They carry no
    gradient.
    """

    def __init__(self) -> None:
        self._group: Any = parallel_state.get_embedding_group()
        ranks = dist.get_process_group_ranks(self._group)
        self._first, self._last = ranks[0], ranks[-1]
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, seen_MD: Tensor) -> None:
        """On the first stage, when the tower has seen a row's pictures; does not wait for the last stage."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        features = seen_MD.detach().contiguous()
        # Kept until it has gone.
        self._sent.append((dist.isend(features, self._last, group=self._group), features))

    def receive(self, tokens: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """On the last stage, [M, D] of the next row."""
        seen_MD = torch.empty(tokens, width, dtype=dtype, device=device)
        dist.recv(seen_MD, self._first, group=self._group)
        return seen_MD
