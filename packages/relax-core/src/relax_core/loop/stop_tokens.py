"""Which tokens end a completion."""

import json
from pathlib import Path
from typing import Any


def stop_token_ids(directory: Path, tokenizer: Any, *, vocab_size: int) -> tuple[int, ...]:
    """The end-of-text tokens of a checkpoint: its generation config's, and the tokenizer's.

    Args:
        directory: the checkpoint's.
        tokenizer: the checkpoint's.
        vocab_size: of the model.

    Raises:
        ValueError: neither names one, so that every completion would run to its length limit; or what is
            named is no token of the model.
    """
    named = _generation_config(directory / "generation_config.json").get("eos_token_id")
    ids = list(named) if isinstance(named, list) else [named]
    strange = [token for token in ids if token is not None and not _is_token(token, vocab_size)]
    if strange:
        raise ValueError(
            f"generation_config.json in {directory} has eos_token_id {named!r}: it must be an id from 0 to "
            f"{vocab_size - 1}, or a list of them"
        )
    found = {token for token in (*ids, tokenizer.eos_token_id) if token is not None}
    if not found:
        raise ValueError(
            f"{directory} names no end-of-text token: set eos_token_id in generation_config.json, or an "
            "eos_token in tokenizer_config.json"
        )
    return tuple(sorted(found))


def _is_token(value: Any, vocab_size: int) -> bool:
    return isinstance(value, int) and 0 <= value < vocab_size


def _generation_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds {type(config).__name__}, not an object")
    return config
