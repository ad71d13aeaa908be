"""Data: rows from files or the hub, tokenised into prompts and samples, drawn in a resumable order.

The settings import at once and quickly; everything else when it is first asked for. Nothing here loads torch,
and transformers is loaded only to open a tokenizer.
"""

from typing import TYPE_CHECKING

from relax_core.data.config import DataConfig
from relax_core.data.problems import BadRow, DataError
from relax_core.lazy import lazy_names

if TYPE_CHECKING:
    from relax_core.data.cursor import Cursor
    from relax_core.data.examples import Message, Pair, Prompt, Sample
    from relax_core.data.load import DataSet, load_pairs, load_prompts, load_samples
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
    "Pair",
    "Prompt",
    "Sample",
    "Tokenizer",
    "load_pairs",
    "load_prompts",
    "load_samples",
    "load_tokenizer",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Cursor": "cursor",
        "DataSet": "load",
        "ExampleStream": "stream",
        "Message": "examples",
        "Pair": "examples",
        "Prompt": "examples",
        "Sample": "examples",
        "Tokenizer": "tokenizer",
        "load_pairs": "load",
        "load_prompts": "load",
        "load_samples": "load",
        "load_tokenizer": "tokenizer",
    },
)
