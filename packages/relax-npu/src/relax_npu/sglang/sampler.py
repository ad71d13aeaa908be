"""SGLang's sampler on the NPU: one choice of the likeliest tokens, and a minimum probability that works.

N requests, V vocabulary, K the largest top-k.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from relax_npu.upstream.fix import replace

_LARGEST_TOP_K = 1024


def apply(module: ModuleType) -> None:
    """Corrects `sglang.srt.layers.sampler`."""

    def sample(
        logits: torch.Tensor,
        top_ks: torch.Tensor,
        top_ps: torch.Tensor,
        min_ps: torch.Tensor,
        need_min_p_sampling: bool,
        sampling_seed: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        p_NV = torch.softmax(logits, dim=-1)
        largest = int(top_ks.max())
        # One pass over the vocabulary: the K likeliest, in order, or all of them.
        kept = largest if largest <= _LARGEST_TOP_K else p_NV.shape[-1]
        p_NK, token_NK = torch.topk(p_NV, min(kept, p_NV.shape[-1]), dim=-1)
        place_K = torch.arange(p_NK.shape[-1], device=p_NK.device)[None]
        hidden = (place_K >= top_ks.view(-1, 1)) | (p_NK.cumsum(-1) - p_NK > top_ps.view(-1, 1))
        if need_min_p_sampling:
            hidden |= p_NK < p_NK[:, :1] * min_ps.view(-1, 1)
        hidden[:, 0] = False
        p_NK = p_NK.masked_fill(hidden, 0.0)
        if sampling_seed is None:
            drawn = torch.multinomial(p_NK, 1)
        else:
            drawn = _seeded(module, p_NK, sampling_seed, positions)
        return token_NK.gather(1, drawn.view(-1, 1)).view(-1).to(torch.int32)

    replace(module, "top_k_top_p_min_p_sampling_from_logits_ascend", sample)


def _seeded(module: Any, p_NK: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    drawn: torch.Tensor = module.multinomial_with_seed(p_NK.double().log(), seed, positions)
    return drawn
