"""Loading a Hugging Face directory for sampling."""

import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from relax_rollout.engines.transformers.cache import SUPPORTED_LAYERS
from relax_rollout.engines.transformers.config import TransformersConfig
from relax_rollout.engines.transformers.delta_net import use_fast_delta_rule

log = logging.getLogger(__name__)


def layer_types_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The kind of each layer, as config.json names it.

    Raises:
        ValueError: a kind that the engine's cache does not know.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = tuple(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        kinds = ("sliding_attention",) * config.num_hidden_layers
    unknown = sorted(set(kinds) - set(SUPPORTED_LAYERS))
    if unknown:
        raise ValueError(
            f"{type(model).__name__} has layers of kind {', '.join(unknown)}; this engine samples "
            f"from {' and '.join(SUPPORTED_LAYERS)} layers: use another engine for this model"
        )
    return kinds


def load_model(config: TransformersConfig) -> PreTrainedModel:
    """Load the model, in eval mode, without gradients; nothing is fetched and no code of the directory runs.

    Raises:
        ValueError: the checkpoint lacks weights of the model or has them in another shape, or the model has
            layers that the engine cannot cache.
    """
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    model, info = AutoModelForCausalLM.from_pretrained(
        Path(config.model),
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    wrong = sorted(info["missing_keys"]) + sorted(str(entry) for entry in info["mismatched_keys"])
    if wrong:
        raise ValueError(
            f"the checkpoint {str(config.model)!r} lacks {len(wrong)} weights of {type(model).__name__}, or "
            f"has them in another shape, for example {', '.join(wrong[:5])}; nothing is sampled from random weights"
        )
    layer_types_of(model)
    model = model.to(config.device).eval().requires_grad_(False)
    changed = use_fast_delta_rule(model)
    log.info(
        "loaded %s on %s, %d delta-net layers on the engine's rule", config.model, config.device, changed
    )
    return model
