"""Prompts with pictures, inside the process of a server that takes requests."""

from typing import Any

import numpy as np
import torch

from relax_rollout.engines.sglang.pictures import FORMAT, PICTURES, from_item


def around_process(original: Any, processor: Any, *arguments: Any, **options: Any) -> Any:
    """Gives SGLang's processor tensors for the pictures that we sent; others go on as they are."""
    items = options.get("image_data")
    if items:
        options["image_data"] = [_tensors(item) if _is_ours(item) else item for item in items]
    return original(processor, *arguments, **options)


def _is_ours(item: Any) -> bool:
    return isinstance(item, dict) and PICTURES in item


def _tensors(item: Any) -> dict[str, Any]:
    placed = from_item(item)
    patches = np.concatenate([one.picture.patches() for one in placed])
    return {
        "format": FORMAT,
        "modality": "image",
        "pixel_values": torch.from_numpy(patches),
        "image_grid_thw": torch.tensor([one.picture.grid for one in placed]),
        # The last token is among them.
        "offsets": [(one.start, one.end - 1) for one in placed],
    }
