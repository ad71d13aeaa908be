"""Settings of low-rank adapters."""

from typing import Literal, Self

from pydantic import model_validator

from relax_core.config.section import Section, SettingError, setting

Target = Literal["linear_qkv", "linear_proj", "in_proj", "out_proj", "linear_fc1", "linear_fc2", "experts"]
"""What is adapted: the projections of full attention (linear_qkv, linear_proj), of the delta net (in_proj,
out_proj), of the feed-forward and of the shared expert (linear_fc1, linear_fc2), and all routed experts."""

LINEAR: tuple[Target, ...] = ("linear_qkv", "linear_proj", "in_proj", "out_proj", "linear_fc1", "linear_fc2")


class LoraConfig(Section):
    """Low-rank adapters in place of whole weights: W x + alpha / rank B A x, with A and B trained alone.

    Hu et al. 2021, arXiv 2106.09685, section 4.1. Embedding, head and norms have none and stay as they are,
    and so do draft layers unless `drafts` adapts their attention and feed-forward too.
    """

    rank: int = setting(0, "Rank of the adapters; 0 trains the weights themselves.", ge=0, le=4096)
    alpha: float = setting(32.0, "Scale of the adapters: their product counts alpha / rank.", gt=0, le=1e6)
    dropout: float = setting(0.0, "Share of an adapter's inputs set to 0 while training.", ge=0, lt=1)
    targets: tuple[Target, ...] = setting(
        LINEAR,
        "Projections that are adapted: linear_qkv, linear_proj (full attention), in_proj, out_proj (delta "
        "net), linear_fc1, linear_fc2 (feed-forward and shared expert), experts (routed ones).",
        min_length=1,
    )

    drafts: bool = setting(
        False, "Adapts the same projections of the draft layers, which are left as they are otherwise."
    )

    sync: Literal["merge", "adapter"] = setting(
        "merge",
        "How engines get what is trained. merge: as whole weights with the adapters added. adapter: as "
        "adapters beside weights that stay, which SGLang 0.5.15 cannot serve for this model; it is refused.",
    )

    @property
    def scale(self) -> float:
        """Factor of the adapters' product."""
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _settings_are_used(self) -> Self:
        unused = [
            name
            for name, info in type(self).model_fields.items()
            if self.rank == 0 and getattr(self, name) != info.default
        ]
        if unused:
            raise SettingError(
                "rank",
                f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect while rank is 0: set "
                "rank, for instance to 16, or leave the rest at their defaults",
                given=0,
                allowed=f"1 or more, or the default of {', '.join(unused)}",
                nearest=16,
            )
        if len(set(self.targets)) < len(self.targets):
            raise SettingError(
                "targets",
                f"targets {', '.join(self.targets)} name one twice: give each once",
                given=self.targets,
                allowed="each once",
                nearest=tuple(dict.fromkeys(self.targets)),
            )
        return self
