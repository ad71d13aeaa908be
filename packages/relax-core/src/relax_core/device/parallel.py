"""How many ranks share one model, and along which axes."""

from typing import Literal

from relax_core.config.section import Section, setting


class ParallelConfig(Section):
    """Sizes of the parallel axes. Data-parallel size follows: world size / (tensor * context * pipeline)."""

    tensor: int = setting(1, "Ranks that split every weight matrix.", unit="ranks", ge=1)
    sequence: bool = setting(False, "Split the tokens between layers over the tensor-parallel ranks.")
    pipeline: int = setting(1, "Ranks that split the layers.", unit="ranks", ge=1)
    context: int = setting(1, "Ranks that split the tokens of every sample.", unit="ranks", ge=1)
    context_attention: Literal["auto", "gather", "heads"] = setting(
        "auto", "How full attention shares a row: gather keys and values, or exchange tokens for heads."
    )
    context_delta: Literal["auto", "heads", "state"] = setting(
        "auto", "How the delta net shares a row: exchange tokens for heads, or hand states on."
    )
    expert: int = setting(1, "Ranks that split the experts.", unit="ranks", ge=1)
    expert_tensor: int | None = setting(
        None, "Ranks that split every expert; the tensor size when not set.", unit="ranks", ge=1
    )

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica of the model: tensor * pipeline * context."""
        return self.tensor * self.pipeline * self.context
