"""Verification of drafted tokens by sampling, where SGLang takes the most likely token on the NPU.

Drafts of one chain are a deterministic proposal. For it the exact rule of speculative sampling (Leviathan et
al., arXiv 2211.17192) is: at each place draw from the model's own distribution given the drafts so far, keep
the draft if it was drawn, else put the drawn token in its place and stop. SGLang's kernel does that with the
token it is given for each place; it only has to be a drawn one, the same on every rank that serves a request:
ranks that disagree about a length wait for one another for ever.

N places (requests times drafts), V vocabulary.
"""

from __future__ import annotations

from contextvars import ContextVar
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from relax_npu.upstream.fix import FixMismatchError, replace

_GROUPS = {
    "sglang.srt.distributed": ("get_tp_group",),
    "sglang.srt.layers.dp_attention": ("get_attention_tp_group", "is_dp_attention_enabled"),
}
_sampling: ContextVar[Any] = ContextVar("relax_npu_sampling", default=None)


class _Torch(ModuleType):
    """The module `torch` as SGLang's verification sees it: `argmax` draws while a batch is verified."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def argmax(self, logits_NV: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Draws from the verified batch's distribution; the most likely token where no batch is verified."""
        info = _sampling.get()
        if info is None or info.is_all_greedy:
            return torch.argmax(logits_NV, dim=dim)
        return of_first_rank(draw(logits_NV, info))


def draw(logits_NV: torch.Tensor, info: Any) -> torch.Tensor:
    """Returns int64 [N], one token for each place at its request's temperature, top-k and top-p.

    A request with top-k of 1 (SGLang's form of temperature 0) gets its most likely token.
    """
    places = len(logits_NV) // len(info.temperatures)

    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(x.view(-1), places, dim=0).view(-1, 1)

    p_NV = torch.softmax(logits_NV.float() / spread(info.temperatures), dim=-1)
    ordered_NV, token_NV = p_NV.sort(dim=-1, descending=True)
    place_V = torch.arange(p_NV.shape[-1], device=p_NV.device)[None]
    before_NV = ordered_NV.cumsum(-1) - ordered_NV
    hidden = (place_V >= spread(info.top_ks)) | (before_NV > spread(info.top_ps))
    hidden[:, 0] = False
    drawn = torch.multinomial(ordered_NV.masked_fill(hidden, 0.0), 1)
    return token_NV.gather(1, drawn)[:, 0]


def of_first_rank(token_N: torch.Tensor) -> torch.Tensor:
    """The first rank's tokens, on every rank that shares the requests; as SGLang does it where it samples."""
    whole, attention = (import_module(name) for name in _GROUPS)
    shared = (
        attention.get_attention_tp_group() if attention.is_dp_attention_enabled() else whole.get_tp_group()
    )
    if shared.world_size > 1:
        shared.broadcast(token_N, src=0)
    return token_N


def apply(module: ModuleType) -> None:
    """Corrects `sglang.srt.speculative.eagle_utils`."""
    for name, wanted in _GROUPS.items():
        missing = [one for one in wanted if not hasattr(import_module(name), one)]
        if missing:
            raise FixMismatchError(f"{name} has no {', '.join(missing)}; not corrected")
    usual = module.eagle_sample

    def eagle_sample(verify_input: Any, batch: Any, logits_output: Any, *rest: Any, **named: Any) -> Any:
        token = _sampling.set(batch.sampling_info)
        try:
            return usual(verify_input, batch, logits_output, *rest, **named)
        finally:
            _sampling.reset(token)

    module.torch = _Torch("torch")  # type: ignore[attr-defined]
    replace(module, "eagle_sample", eagle_sample)
