"""Which tokens end a completion."""

import json
from pathlib import Path
from typing import Any


def stop_token_ids(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """The end-of-text tokens of a checkpoint: its generation config's, or else the tokenizer's.

    Raises:
        ValueError: neither names one, so that every completion would run to its length limit.
    """
    file = directory / "generation_config.json"
    named = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ids = {named} if isinstance(named, int) else set(named or ())
    ids |= set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if not ids:
        raise ValueError(
            f"{directory} names no end-of-text token: set eos_token_id in generation_config.json, or an "
            "eos_token in tokenizer_config.json"
        )
    return tuple(sorted(ids))
