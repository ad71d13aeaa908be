"""Log-probabilities of given token ids: the fields that carry them are those that SGLang sends on."""

from __future__ import annotations

from types import ModuleType
from typing import Any

FIELDS = ("next_token_token_ids_logprobs_val", "next_token_token_ids_logprobs_idx")


class LostLogprobsError(RuntimeError):
    """Log-probabilities were asked for and did not arrive in the fields that are sent on."""


def apply(module: ModuleType) -> None:
    """Corrects `sglang.srt.layers.sampler`: what was asked for and did not come is an error."""
    usual = module.Sampler._attach_logprobs_to_output

    def attach(
        self: Any,
        logits_output: Any,
        logprobs: Any,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        *rest: Any,
    ) -> Any:
        result = usual(self, logits_output, logprobs, top_logprobs_nums, token_ids_logprobs, *rest)
        if any(ids is not None for ids in token_ids_logprobs):
            missing = [name for name in FIELDS if getattr(logits_output, name, None) is None]
            if missing:
                raise LostLogprobsError(
                    f"asked for log-probs of token ids, but {', '.join(missing)} is empty"
                )
        return result

    module.Sampler._attach_logprobs_to_output = attach
