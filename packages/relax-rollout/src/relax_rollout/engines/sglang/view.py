"""A checkpoint as SGLang 0.5.15 can serve it: a folder of links and a config.json of its own.

That release knows Qwen3.5 only in the vision-language layout, needs ``full_attention_interval``, which
transformers does not write, and takes 0.25 for the rotated share of a head where ``rope_parameters`` alone
states it. The weights are linked, never copied; their names stay as they are.
"""

import json
from pathlib import Path
from typing import Any

MARGIN = 64
"""Positions beyond the model's: SGLang keeps some for itself, and drafts may reach past an end."""

LAYOUTS = {
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
}


def is_text_only(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a Qwen3.5 without a vision tower."""
    return config.get("model_type") in LAYOUTS


def max_context(model: Path) -> int:
    """The most tokens of prompt and completion that a checkpoint is made for."""
    config = json.loads((model / "config.json").read_text())
    found: int = config.get("text_config", config).get("max_position_embeddings", 2**20)
    return found


def write_view(model: Path, folder: Path) -> Path:
    """Make the folder for a checkpoint.

    Args:
        model: the checkpoint.
        folder: an empty folder.

    Returns:
        the folder, or the checkpoint itself if it is of another model than Qwen3.5.

    Raises:
        ValueError: the layers do not come in a fixed rhythm, so that no interval describes them.
    """
    config = json.loads((model / "config.json").read_text())
    text = config if is_text_only(config) else config.get("text_config", {})
    if not is_text_only(text):
        return model
    text = {"full_attention_interval": _interval(text)} | text
    text["max_position_embeddings"] = max_context(model) + MARGIN
    stated = {"partial_rotary_factor": 0.25} | text | (text.get("rope_parameters") or {})
    text["partial_rotary_factor"] = stated["partial_rotary_factor"]
    if text.get("model_type") == config.get("model_type"):
        kind, architecture = LAYOUTS[config["model_type"]]
        config = {
            "architectures": [architecture],
            "model_type": kind,
            "dtype": config.get("dtype", "float32"),
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            "eos_token_id": config.get("eos_token_id"),
            "text_config": text,
            # A tower that the plugin leaves out; the sizes are what the config class wants to see.
            "vision_config": {"model_type": kind, "depth": 1, "hidden_size": 32, "num_heads": 2},
        }
    else:
        config = config | {"text_config": text}
    for file in model.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _interval(text: dict[str, Any]) -> int:
    kinds = list(text.get("layer_types") or [])
    full = [place for place, kind in enumerate(kinds) if kind == "full_attention"]
    interval = full[0] + 1 if full else len(kinds) + 1
    for place, kind in enumerate(kinds):
        if (kind == "full_attention") != ((place + 1) % interval == 0):
            raise ValueError(
                f"layer_types has full attention at {full}; SGLang serves only models where every n-th layer "
                "is full attention"
            )
    return interval
