"""Settings of multi-token prediction: how much its loss counts, and what its gradient may reach."""

from typing import Literal

from relax_core.config.section import Section, setting


class MtpConfig(Section):
    """The draft layers train with a loss of their own; by default it changes nothing but them."""

    loss_coefficient: float = setting(
        0.1, "Weight of the draft layers' loss, shared equally by the depths; 0 leaves them untrained.", ge=0
    )
    layers: int | None = setting(
        None, "Draft layers of the model; null takes those of the checkpoint's config.json.", ge=0, le=64
    )
    init: Literal["copy", "random", "truncate"] | None = setting(
        None,
        "If the checkpoint holds another number of draft layers: copy repeats its layers, random draws the "
        "added ones with run.seed, truncate leaves the last ones out; null refuses.",
    )
    repeated: int = setting(
        1,
        "Depths for which one draft layer is applied again and again; 1 gives each draft layer of the "
        "checkpoint one depth.",
        unit="depths",
        ge=1,
        le=64,
    )
    only: bool = setting(False, "Trains the draft layers alone: trunk, embedding and head stay as they are.")
    detach_embedding: bool = setting(True, "Keep the draft loss's gradient out of the token embedding.")
    detach_trunk: bool = setting(True, "Keep the draft loss's gradient out of the trunk's hidden states.")
    detach_head: bool = setting(True, "Keep the draft loss's gradient out of the output head.")
