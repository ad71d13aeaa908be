"""Data: rows from files or the hub, tokenised into prompts and samples, drawn in a resumable order.

The settings import at once and quickly; everything else when it is first asked for. Nothing here loads torch,
and transformers is loaded only to open a tokenizer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from relax_core.data.config import DataConfig
from relax_core.data.problems import BadRow, DataError

if TYPE_CHECKING:
    from relax_core.data.cursor import Cursor
    from relax_core.data.examples import Message, Prompt, Sample
    from relax_core.data.load import DataSet, load_prompts, load_samples
    from relax_core.data.stream import ExampleStream
    from relax_core.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "BadRow",
    "Cursor",
    "DataConfig",
    "DataError",
    "DataSet",
    "ExampleStream",
    "Message",
    "Prompt",
    "Sample",
    "Tokenizer",
    "load_prompts",
    "load_samples",
    "load_tokenizer",
]

_MODULE_OF = {
    "Cursor": "cursor",
    "DataSet": "load",
    "ExampleStream": "stream",
    "Message": "examples",
    "Prompt": "examples",
    "Sample": "examples",
    "Tokenizer": "tokenizer",
    "load_prompts": "load",
    "load_samples": "load",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
