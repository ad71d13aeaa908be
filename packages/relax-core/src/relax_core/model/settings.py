"""Settings of the model: where its checkpoint lies."""

from typing import Literal

from relax_core.config.section import Section, setting


class ModelSettings(Section):
    """The checkpoint that training starts from."""

    path: str = setting(
        "builtin:quickstart/model",
        "Hugging Face directory with config.json, safetensors and tokenizer; builtin:quickstart/model ships "
        "with relax-core.",
        min_length=1,
    )
    vision: Literal["absent", "frozen", "trained"] = setting(
        "absent",
        "The vision tower of a model that has one: absent leaves it out, and exports carry it as it is; "
        "frozen sees pictures through it; trained trains it as well. Engines and critics do the same.",
    )
    random_weights: bool = setting(
        False,
        "Starts from random weights drawn with run.seed: of path only config and tokenizer are read.",
    )
    reference_path: str | None = setting(
        None, "Checkpoint of the frozen reference policy of the KL; null takes model.path."
    )
