"""Loading a Hugging Face directory for sampling."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

from relax_rollout.engines.transformers.cache import SUPPORTED_LAYERS
from relax_rollout.engines.transformers.config import TransformersConfig
from relax_rollout.engines.transformers.delta_net import use_fast_delta_rule

log = logging.getLogger(__name__)

FLOAT32_WEIGHTS = ("A_log", "dt_bias")
"""Weights of the decay that stay float32 if stored so: the decay is an exponential of them."""


def layer_types_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The kind of each layer, as config.json names it.

    Raises:
        ValueError: a kind that the engine's cache does not know.
    """
    config = model.config.get_text_config(decoder=True)
    named = getattr(config, "layer_types", None)
    plain = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = tuple(named or [plain] * config.num_hidden_layers)
    unknown = sorted(set(kinds) - set(SUPPORTED_LAYERS))
    if unknown:
        raise ValueError(
            f"{type(model).__name__} has layers of kind {', '.join(unknown)}; this engine samples from "
            f"{' and '.join(SUPPORTED_LAYERS)} layers: use another engine for this model"
        )
    return kinds


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar, and no warning about fast kernels that this engine does without; errors still show."""
    level, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()


def _stored_float32(directory: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's float32 tensors among FLOAT32_WEIGHTS."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a shard is not a mapping
                if name.endswith(FLOAT32_WEIGHTS) and shard.get_slice(name).get_dtype() == "F32":
                    found[name] = shard.get_tensor(name)
    return found


def load_model(config: TransformersConfig) -> PreTrainedModel:
    """Load the model, in eval mode, without gradients; nothing is fetched and no code of the directory runs.

    Raises:
        ValueError: the checkpoint lacks weights of the model or has them in another shape, the model has
            layers that the engine cannot cache, or no vision tower though it is asked for.
    """
    directory = Path(config.model)
    if config.pictures and "vision_config" not in json.loads((directory / "config.json").read_text()):
        raise ValueError(
            f"pictures is True, and config.json in {str(directory)!r} has no vision_config: the model has no "
            "vision tower; set pictures to False"
        )
    with _quiet_transformers():
        auto = AutoModelForImageTextToText if config.pictures else AutoModelForCausalLM
        model, info = auto.from_pretrained(
            directory,
            dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    wrong = sorted(info["missing_keys"]) + sorted(str(entry) for entry in info["mismatched_keys"])
    if wrong:
        raise ValueError(
            f"the checkpoint {str(directory)!r} lacks {len(wrong)} weights of {type(model).__name__}, or has "
            f"them in another shape, for example {', '.join(wrong[:5])}; random weights are not sampled from"
        )
    layer_types_of(model)
    stored = _stored_float32(directory)
    for name, parameter in model.named_parameters():
        given = stored.get(name, stored.get(name.replace("model.", "model.language_model.", 1)))
        if given is not None and parameter.dtype != torch.float32:
            parameter.data = given
    model = model.to(config.device).eval().requires_grad_(False)
    changed = use_fast_delta_rule(model)
    log.info("loaded %s on %s, %d delta-net layers with the engine's rule", directory, config.device, changed)
    return model
