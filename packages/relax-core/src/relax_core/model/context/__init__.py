"""Context parallelism: ranks that share one packed row, in full attention and in the gated delta net.

What needs torch is imported on first use: the choice between the ways is also made where nothing runs.
"""

from typing import TYPE_CHECKING

from relax_core.lazy import lazy_names
from relax_core.model.context.choose import (
    ContextChoice,
    choose_attention,
    choose_context,
    choose_delta,
    context_choice,
)

if TYPE_CHECKING:
    from relax_core.model.context.attention import context_attention
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

__getattr__ = lazy_names(
    __name__, {"DeltaHeads": "delta", "context_attention": "attention", "context_delta": "delta"}
)
