"""The part of a Hugging Face tokenizer that data needs, and how one is opened."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from relax_core.data.problems import DataError


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of conversations."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        ...

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the special tokens that have a role."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """All added tokens by id; `special` tells those that text never gives."""
        ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Special tokens by role, which templates can read."""
        ...

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Token ids under `input_ids`, for each text."""
        ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """The text of token ids."""
        ...

    def apply_chat_template(self, conversation: list[Any], **options: Any) -> Any:
        """The rendered conversation."""
        ...

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
        """The template in use."""
        ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Opens the tokenizer of a Hugging Face model folder; nothing is fetched and no code of it runs.

    Args:
        path: as in `model.path`; `builtin:` names a folder that ships with the package.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    from relax_core.assets import locate

    try:
        place = locate(str(path))
        found = AutoTokenizer.from_pretrained(str(place), local_files_only=True, trust_remote_code=False)
    # The tokenizers library raises bare exceptions for a file that it cannot use.
    except Exception as error:
        raise DataError(f"no tokenizer can be read from {path}: {type(error).__name__}: {error}") from error
    return cast(Tokenizer, found)


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool = False
) -> list[list[int]]:
    """Token ids of each text; special tokens written out in a text become the tokens they name."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens written out and no space touched."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def special_texts(tokenizer: Tokenizer) -> frozenset[str]:
    """Texts of all special tokens, those without a role included."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset(added | set(tokenizer.all_special_tokens))
