"""Context parallelism: ranks that share one packed row, in full attention and in the gated delta net."""

from relax_core.model.context.attention import context_attention
from relax_core.model.context.choose import (
    ContextChoice,
    choose_attention,
    choose_context,
    choose_delta,
    context_choice,
)
from relax_core.model.context.delta import DeltaHeads, context_delta

__all__ = [
    "ContextChoice",
    "DeltaHeads",
    "choose_attention",
    "choose_context",
    "choose_delta",
    "context_attention",
    "context_choice",
    "context_delta",
]
