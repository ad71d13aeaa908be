"""Errors about which rows of the output head a tensor-parallel rank holds.

Axes: S scored positions, D hidden, V vocabulary rows of this rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from relax_kernels import LogProbs, linear_logprob

from relax_core.testing.row import Row

_OPERATOR = "relax_core.model.head.linear_logprob"


@contextmanager
def entropy_of_own_part(row: Row) -> Iterator[None]:
    """A sum over the vocabulary (as label smoothing has one too) stops at the rank's own rows."""

    def own(hidden_SD: torch.Tensor, weight_VD: torch.Tensor, *args: Any, **options: Any) -> LogProbs:
        scored = linear_logprob(hidden_SD, weight_VD, *args, **options)
        if scored.entropy_T is None or options["process_group"] is None:
            return scored
        logits_SV = hidden_SD @ weight_VD.T / options["temperature"]
        total_S = logits_SV.detach().logsumexp(-1).exp()
        dist.all_reduce(total_S, group=options["process_group"])
        logprob_SV = logits_SV - total_S.log().unsqueeze(-1)
        return LogProbs(scored.logprob_T, -(logprob_SV.exp() * logprob_SV).sum(-1))

    with patch(_OPERATOR, own):
        yield


@contextmanager
def whole_logits_as_part(row: Row) -> Iterator[None]:
    """Every rank has all logits, and the log-prob adds them up over ranks as if each had a part."""

    def doubled(hidden_SD: torch.Tensor, weight_VD: torch.Tensor, *args: Any, **options: Any) -> LogProbs:
        group = options["process_group"]
        if group is not None:
            weight_DV = gather_from_tensor_model_parallel_region(weight_VD.T.contiguous(), group=group)
            weight_VD = weight_DV.T.contiguous()
        return linear_logprob(hidden_SD, weight_VD, *args, **options)

    with patch(_OPERATOR, doubled):
        yield
