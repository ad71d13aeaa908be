"""Settings of the embedded engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

ModelDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """Settings of the embedded engine.

    Args:
        model: directory with a Hugging Face causal language model (config.json and safetensors).
        dtype: of the weights and the arithmetic; "auto" takes the one that config.json names.
        device: torch device, for example "cpu" or "cuda:0".
        max_rows: the most completions drawn at once; the others wait their turn.
        max_prefill_tokens: the most prompt tokens, padding included, in one forward call.
        version: version of the weights in ``model``.
        pictures: load the model's vision tower too, so that prompts may have pictures.

    Raises:
        ValueError: no such directory, or a value outside its range.
    """

    model: str | Path
    dtype: ModelDtype = "auto"
    device: str = "cpu"
    max_rows: int = 256
    max_prefill_tokens: int = 8192
    version: int = 0
    pictures: bool = False

    def __post_init__(self) -> None:
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(
                f"model is {str(self.model)!r}, which is no directory with a config.json; give the directory "
                "of a Hugging Face checkpoint (download it first: the engine fetches nothing)"
            )
        if self.dtype not in get_args(ModelDtype):
            raise ValueError(f"dtype is {self.dtype!r}; allowed are {', '.join(get_args(ModelDtype))}")
        for name, low in (("max_rows", 1), ("max_prefill_tokens", 1), ("version", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {low}")
