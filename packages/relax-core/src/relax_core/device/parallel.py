"""How many ranks share one model, and along which axes."""

from typing import Literal, Self

from pydantic import model_validator

from relax_core.config.section import Section, SettingError, setting


class ParallelConfig(Section):
    """Sizes of the parallel axes. Data-parallel size follows: world size / (tensor * context * pipeline)."""

    tensor: int = setting(1, "Ranks that split every weight matrix.", unit="ranks", ge=1)
    sequence: bool = setting(False, "Split the tokens between layers over the tensor-parallel ranks.")
    pipeline: int = setting(1, "Ranks that split the layers.", unit="ranks", ge=1)
    pipeline_chunks: int = setting(
        1, "Pieces of the layers on each pipeline rank; above 1 the schedule is interleaved.", ge=1
    )
    first_stage_layers: int | None = setting(
        None, "Layers of the first pipeline stage; an even share when not set.", unit="layers", ge=1
    )
    last_stage_layers: int | None = setting(
        None,
        "Layers of the last pipeline stage, which has the head and the draft layers besides; an even share "
        "when not set.",
        unit="layers",
        ge=1,
    )
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

    @model_validator(mode="after")
    def _axes_that_need_another(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise SettingError(
                "sequence",
                "sequence is true and tensor is 1: the tokens are spread over the tensor-parallel ranks; "
                "set tensor to 2 or more, or sequence to false",
                given=True,
                allowed="false, or tensor 2 or more",
                nearest=False,
            )
        if self.pipeline_chunks > 1 and self.pipeline == 1:
            raise SettingError(
                "pipeline_chunks",
                f"pipeline_chunks is {self.pipeline_chunks} and pipeline is 1: only a pipeline is "
                "interleaved; set pipeline to 2 or more, or pipeline_chunks to 1",
                given=self.pipeline_chunks,
                allowed="1, or pipeline 2 or more",
                nearest=1,
            )
        for name in ("first_stage_layers", "last_stage_layers"):
            if getattr(self, name) is not None and self.pipeline == 1:
                raise SettingError(
                    name,
                    f"{name} is {getattr(self, name)} and pipeline is 1: the only stage has all layers; set "
                    f"pipeline to 2 or more, or leave {name} out",
                    given=getattr(self, name),
                    allowed="null, or pipeline 2 or more",
                    nearest=None,
                )
        return self

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica of the model: tensor * pipeline * context."""
        return self.tensor * self.pipeline * self.context

    @property
    def row_multiple(self) -> int:
        """What the positions of a packed row must divide by: 2 chunks per context rank, and each context
        rank's share by the tensor-parallel ranks that split it."""
        return (2 * self.context if self.context > 1 else 1) * (self.tensor if self.sequence else 1)
