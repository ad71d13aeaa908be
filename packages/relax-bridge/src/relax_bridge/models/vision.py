"""The vision tower of Qwen3.5: every tensor one to one, whole on every rank of the first pipeline stage.

Names and shapes: transformers' `Qwen3_5VisionModel`.
"""

from collections.abc import Mapping
from typing import Any

from relax_bridge.errors import ConfigError
from relax_bridge.table import Place, Row
from relax_bridge.transforms import Shape

VISION = "model.visual."

_SIZES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "in_channels",
    "temporal_patch_size",
    "patch_size",
    "spatial_merge_size",
    "out_hidden_size",
    "num_position_embeddings",
)


def tower_of(config: Mapping[str, Any]) -> list[Row]:
    """The rows of the tower that a config's `vision_config` describes.

    Raises:
        ConfigError: there is none, or a size is absent or no positive integer.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ConfigError("the model config has no vision_config: it is a text model, without a tower")
    bad = [f"{key} = {vision.get(key)!r}" for key in _SIZES if not _positive(vision.get(key))]
    if bad:
        raise ConfigError("vision_config needs positive integers; got " + ", ".join(bad))
    depth, hidden, ffn, channels, frames, patch, merge, out, places = (vision[key] for key in _SIZES)
    joined = hidden * merge**2
    top, block = Place("visual.", VISION), "blocks.{i}."
    at = Place("visual." + block, VISION + block, tuple(range(depth)))
    return [
        top.row(
            "patch_embed.proj.weight", "patch_embed.proj.weight", (hidden, channels, frames, patch, patch)
        ),
        top.row("patch_embed.proj.bias", "patch_embed.proj.bias", (hidden,)),
        top.row("pos_embed.weight", "pos_embed.weight", (places, hidden)),
        *_affine(at, "norm1", (hidden,)),
        *_affine(at, "attn.qkv", (3 * hidden, hidden)),
        *_affine(at, "attn.proj", (hidden, hidden)),
        *_affine(at, "norm2", (hidden,)),
        *_affine(at, "mlp.linear_fc1", (ffn, hidden)),
        *_affine(at, "mlp.linear_fc2", (hidden, ffn)),
        *_affine(top, "merger.norm", (hidden,)),
        *_affine(top, "merger.linear_fc1", (joined, joined)),
        *_affine(top, "merger.linear_fc2", (out, joined)),
    ]


def _affine(at: Place, name: str, shape: Shape) -> list[Row]:
    return [
        at.row(f"{name}.weight", f"{name}.weight", shape),
        at.row(f"{name}.bias", f"{name}.bias", shape[:1]),
    ]


def _positive(value: object) -> bool:
    return type(value) is int and value > 0
