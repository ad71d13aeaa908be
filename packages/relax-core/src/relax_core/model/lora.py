"""What adapters start as, and that nothing else is trained."""

import math
import zlib
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from torch import Tensor

from relax_core.model.config import Qwen35Config
from relax_core.model.experts import Experts
from relax_core.model.linear import Adapted, RowLinear, is_adapter
from relax_core.model.lora_config import LoraConfig
from relax_core.model.placement import whole_name
from relax_core.model.qwen35 import Qwen35Model


def refuse_idle_targets(model: Qwen35Config, lora: LoraConfig | None) -> None:
    """Checks that the model has every projection that is to be adapted.

    Raises:
        ValueError: naming those it lacks.
    """
    if lora is None or not lora.rank:
        return
    if lora.drafts and not model.mtp_layers:
        raise ValueError(
            "lora.drafts is true and the model has no draft layers: set lora.drafts to false, or mtp.layers "
            "to the number of draft layers that it is to have"
        )
    kinds = set(model.layer_types) | ({"full_attention"} if lora.drafts else set())
    there = {
        "linear_qkv": "full_attention" in kinds,
        "linear_proj": "full_attention" in kinds,
        "in_proj": "linear_attention" in kinds,
        "out_proj": "linear_attention" in kinds,
        "experts": model.experts > 0,
    }
    idle = [target for target in lora.targets if not there.get(target, True)]
    if idle:
        raise ValueError(
            f"lora.targets has {', '.join(idle)}, which this model has none of: leave "
            f"{'it' if len(idle) == 1 else 'them'} out"
        )


@torch.no_grad()
def train_adapters_alone(model: Qwen35Model, *, seed: int) -> None:
    """Freezes everything but the adapters, and draws these.

    B is 0, so that the model is what it was; A is uniform within 1 / sqrt(I), as PEFT draws it. An adapter's
    numbers depend on its name in the whole model and `seed`, not on how ranks share it.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for own, module in adapted_modules(model):
        name = whole_name(model, own)
        if isinstance(module, RowLinear):
            rank = parallel_state.get_tensor_model_parallel_rank()
            inputs, first = module.input_size, rank * module.input_size_per_partition
            drawn_RI = _uniform(name, seed, (module.lora_A.shape[0], inputs))
            module.lora_A.copy_(drawn_RI[:, first : first + module.input_size_per_partition])
        elif module.lora_A.ndim == 3:
            experts = model.get_submodule(own.rsplit(".", 1)[0])
            assert isinstance(experts, Experts)
            for row, whole_RI in enumerate(module.lora_A):
                whole_RI.copy_(_uniform(f"{name}{experts.first + row}", seed, tuple(whole_RI.shape)))
        else:
            module.lora_A.copy_(_uniform(name, seed, tuple(module.lora_A.shape)))


def adapted_modules(model: torch.nn.Module) -> Iterator[tuple[str, Adapted]]:
    """The projections of a model that have adapters, by their names there."""
    for name, module in model.named_modules():
        if isinstance(module, Adapted) and module.lora is not None:
            yield name, module


def _uniform(name: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])
