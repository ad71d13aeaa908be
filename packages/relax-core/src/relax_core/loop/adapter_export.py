"""Adapters as PEFT stores them, so that `peft.PeftModel.from_pretrained` puts them on the base model.

transformers has no draft layers, so that PEFT could not place their adapters: these lie beside, in a file of
their own.

A projection that Megatron fuses is several in Hugging Face: each gets the same A and its own rows of B.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from relax_core.model import Qwen35Model
from relax_core.model.lora_config import LoraConfig
from relax_core.model.placement import AdapterEntry, Placement
from relax_core.run.files import sync_folder

_PREFIX = "base_model.model."
_ROUTED = ".experts."
_DRAFT = f"{_PREFIX}mtp."


def adapter_tensors(placement: Placement, chunks: Sequence[Qwen35Model]) -> Iterator[tuple[str, Tensor]]:
    """Whole adapters under PEFT's names; on every rank, which must iterate together.

    Routed experts, whose weights are one tensor of all experts in transformers, follow PEFT's form for such:
    A [experts x rank, in] with the ranks of an expert together, B [out, rank x experts] with the experts of a
    rank together.
    """
    routed: dict[str, list[Tensor]] = {}
    for entry, tensor in placement.whole_adapters(chunks):
        if entry.expert is not None:
            routed.setdefault(_routed_name(entry), []).append(tensor.clone())
            continue
        outer = "lora_B" in entry.megatron
        parts = entry.weight.transform.inverse(tensor) if outer else [tensor] * len(entry.weight.hf)
        for name, part in zip(entry.weight.hf, parts, strict=True):
            module = name.removesuffix(".weight")
            yield f"{_PREFIX}{module}.{'lora_B' if outer else 'lora_A'}.weight", part.contiguous()
    for name, experts in routed.items():
        stacked = torch.stack(experts)
        if name.endswith("lora_A.weight"):
            yield name, stacked.flatten(0, 1).contiguous()
        else:
            yield name, stacked.permute(1, 2, 0).flatten(1).contiguous()


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], lora: LoraConfig, *, base: str) -> None:
    """Writes `adapter_config.json`, `adapter_model.safetensors` and, of adapted draft layers,
    `draft_adapter.safetensors`, whole or not at all.

    Args:
        directory: replaced if it exists.
        tensors: from `adapter_tensors`.
        lora: the run's.
        base: the checkpoint that the adapters belong to, as the run names it.
    """
    drafts = {name: tensor for name, tensor in tensors.items() if name.startswith(_DRAFT)}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drafts}
    modules = {name.removeprefix(_PREFIX).rsplit(".", 2)[0] for name in tensors}
    linear = sorted({module.rsplit(".", 1)[-1] for module in modules if not _is_routed(module)})
    facts: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": linear,
    }
    if any(_is_routed(module) for module in modules):
        facts["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "adapter_config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    for name, content in (("adapter_model.safetensors", tensors), ("draft_adapter.safetensors", drafts)):
        if content:
            # Memory of its own for each, as safetensors wants it.
            save_file({n: x.to("cpu", copy=True) for n, x in content.items()}, partial / name)
    for file in partial.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    sync_folder(directory.parent)


def _routed_name(entry: AdapterEntry) -> str:
    """PEFT wraps the second of a module's parameters around the first."""
    first = "linear_fc1" in entry.megatron
    module = entry.weight.hf[0].partition(_ROUTED)[0] + _ROUTED.rstrip(".")
    matrix = "lora_B" if "lora_B" in entry.megatron else "lora_A"
    return f"{_PREFIX}{module}{'.base_layer' if first else ''}.{matrix}.weight"


def _is_routed(module: str) -> bool:
    return module.endswith((".experts", ".experts.base_layer"))
