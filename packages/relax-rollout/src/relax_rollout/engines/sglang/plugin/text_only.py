"""Text-only checkpoints: SGLang 0.5.15 knows Qwen3.5 only with a vision tower, so the tower is left out."""

from typing import Any

from torch import nn


class NoVision(nn.Module):
    """Stands where the vision tower would; has no weights."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__()
        self.deepstack_visual_indexes: list[int] = []
        self.out_hidden_size = 0
