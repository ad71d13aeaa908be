"""`VisionConfig`: the facts of a Qwen3.5 vision tower, read from the `vision_config` of a `config.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the tower.

    Attributes:
        depth: transformer blocks.
        hidden_size: features inside the tower.
        ffn_size: features inside its feed-forward.
        heads: attention heads; divides hidden_size.
        patch_features: numbers of one patch: channels x frames x pixels of a square patch.
        patch_shape: the same as (channels, frames, height, width).
        merge: patches along one side of the square that becomes one token.
        out_size: features of a token: the text model's hidden size.
        side: learned positions along one side of their square grid.
    """

    depth: int
    hidden_size: int
    ffn_size: int
    heads: int
    patch_shape: tuple[int, int, int, int]
    merge: int
    out_size: int
    side: int

    @property
    def patch_features(self) -> int:
        """Numbers of one patch."""
        channels, frames, height, width = self.patch_shape
        return channels * frames * height * width

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "VisionConfig":
        """Reads a `vision_config`, which `problems_of` found nothing wrong with."""
        patch = int(config["patch_size"])
        return cls(
            depth=int(config["depth"]),
            hidden_size=int(config["hidden_size"]),
            ffn_size=int(config["intermediate_size"]),
            heads=int(config["num_heads"]),
            patch_shape=(int(config["in_channels"]), int(config["temporal_patch_size"]), patch, patch),
            merge=int(config["spatial_merge_size"]),
            out_size=int(config["out_hidden_size"]),
            side=isqrt(int(config["num_position_embeddings"])),
        )


_SIZES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "in_channels",
    "temporal_patch_size",
    "patch_size",
    "spatial_merge_size",
    "out_hidden_size",
    "num_position_embeddings",
)


def problems_of(config: Mapping[str, Any], text: Mapping[str, Any]) -> Sequence[str]:
    """One sentence for each thing in a `vision_config` that cannot be built onto the text model `text`."""
    missing = [key for key in _SIZES if type(config.get(key)) is not int or config[key] < 1]
    if missing:
        return [f"vision_config: {', '.join(missing)} must be positive integers, but are missing or are not"]
    found = []
    if config.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        found.append(
            f"vision_config.hidden_act is {config['hidden_act']!r}: only 'gelu_pytorch_tanh' is supported"
        )
    if config.get("deepstack_visual_indexes"):
        found.append("vision_config.deepstack_visual_indexes is set: only towers without it are supported")
    if config["hidden_size"] % config["num_heads"] or config["hidden_size"] // config["num_heads"] % 4:
        found.append(
            f"vision_config: {config['num_heads']} heads of hidden_size {config['hidden_size']}: the head "
            "size must be a multiple of 4"
        )
    if isqrt(config["num_position_embeddings"]) ** 2 != config["num_position_embeddings"]:
        found.append(
            f"vision_config.num_position_embeddings is {config['num_position_embeddings']}: it must be a "
            "square"
        )
    if config["out_hidden_size"] != text.get("hidden_size"):
        found.append(
            f"vision_config.out_hidden_size is {config['out_hidden_size']}, hidden_size of the text model "
            f"{text.get('hidden_size')}: they must be equal"
        )
    return found
