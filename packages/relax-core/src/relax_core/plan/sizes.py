"""How large a model is, and which draft layers a run trains."""

from dataclasses import replace

from relax_core.config.root import RelaxConfig
from relax_core.device.parallel import ParallelConfig
from relax_core.model.config import Qwen35Config
from relax_core.plan.local import Local
from relax_core.plan.parameters import DRAFTS, TOWER, Count, stage_parameters


def trained_model(model: Qwen35Config, config: RelaxConfig) -> Qwen35Config:
    """The model with the draft layers that the run asks for."""
    layers = config.mtp.layers
    return model if layers is None else replace(model, mtp_layers=layers)


def model_sizes(model: Qwen35Config) -> tuple[int, int]:
    """(weights, weights that a token uses); draft layers and a vision tower are among the former alone."""
    local = Local.of(model, ParallelConfig(), tokens=1, activation=2)
    parts = stage_parameters(local, model.layer_types, first=True, last=True)
    total = sum(parts.values(), start=Count())
    draft = parts.get(DRAFTS, Count())
    active = total.total - draft.total - parts.get(TOWER, Count()).total
    if model.experts:
        idle = 1 - model.experts_per_token / model.experts
        active -= round((total.expert - draft.expert) * idle)
    return total.total, active
