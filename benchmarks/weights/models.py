"""Qwen3.5 of 2B and 4B as a trainer holds them, and plain modules that fuse as an engine does."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from relax_bridge import model_map
from relax_bridge.models.published import PUBLISHED
from torch import Tensor, nn

TINY = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
FUSED = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up",
    "in_proj_qkv": "qkvz", "in_proj_z": "qkvz", "in_proj_b": "ba", "in_proj_a": "ba",
}  # fmt: skip


def config(size: str) -> dict[str, Any]:
    """Of the published model; "tiny" is the 2B with small layers."""
    whole = PUBLISHED["Qwen3.5-2B" if size == "tiny" else f"Qwen3.5-{size}"]
    return {**whole, "text_config": {**whole["text_config"], **(TINY if size == "tiny" else {})}}


def dtype_of(name: str) -> torch.dtype:
    """As published."""
    return torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16


class Trainer:
    """Megatron tensors in one buffer per dtype, as Megatron's data-parallel wrapper keeps them.

    Args:
        size: "2B", "4B" or "tiny".
        device: where.
    """

    def __init__(self, size: str, device: torch.device) -> None:
        self.table = model_map(config(size))
        shapes = self.table.megatron_shapes()
        counts = dict.fromkeys((torch.bfloat16, torch.float32), 0)
        for name, shape in shapes.items():
            counts[dtype_of(name)] += -(-torch.Size(shape).numel() // 64) * 64
        self.buffers = {d: torch.empty(n, dtype=d, device=device) for d, n in counts.items()}
        generator = torch.Generator(device=device).manual_seed(0)
        for buffer in self.buffers.values():
            buffer.normal_(generator=generator)
        self.tensors: dict[str, Tensor] = {}
        starts = dict.fromkeys(counts, 0)
        for name, shape in shapes.items():
            dtype, count = dtype_of(name), torch.Size(shape).numel()
            self.tensors[name] = self.buffers[dtype][starts[dtype] :][:count].view(shape)
            starts[dtype] += -(-count // 64) * 64

    @staticmethod
    def hf_shapes(size: str) -> dict[str, tuple[int, ...]]:
        """Of the checkpoint."""
        return model_map(config(size)).hf_shapes()

    def step(self) -> None:
        """Other weights."""
        for buffer in self.buffers.values():
            buffer.mul_(-1)

    def export(self) -> Iterable[tuple[str, Tensor]]:
        """The weights by their Hugging Face names."""
        return self.table.export_tensors(self.tensors)


class Engine(nn.Module):
    """Parameters as an engine fuses them, and a loader that copies a checkpoint's tensors into them.

    Args:
        shapes: of the tensors that this model holds.
        device: where.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        super().__init__()
        self.place: dict[str, tuple[str, int, int]] = {}
        rows: dict[str, int] = {}
        for name, shape in shapes.items():
            *head, leaf = name.removesuffix(".weight").split(".")
            parameter = "_".join([*head, FUSED.get(leaf, leaf)])
            self.place[name] = parameter, rows.get(parameter, 0), shape[0]
            rows[parameter] = rows.get(parameter, 0) + shape[0]
        for name, (parameter, start, _) in self.place.items():
            if start == 0:
                room = torch.zeros((rows[parameter], *shapes[name][1:]), dtype=dtype_of(name), device=device)
                self.register_buffer(parameter, room)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor to its rows; those of other models are left aside."""
        for name, tensor in weights:
            if name in self.place:
                parameter, start, count = self.place[name]
                getattr(self, parameter).narrow(0, start, count).copy_(tensor)


def engine_models(size: str, device: torch.device) -> dict[str, nn.Module]:
    """Target and draft, which share the embedding."""
    shapes = model_map(config(size)).hf_shapes()
    embedding = next(name for name in shapes if name.endswith("embed_tokens.weight"))
    draft = {n: s for n, s in shapes.items() if n.startswith("mtp.") or n == embedding}
    target = {n: s for n, s in shapes.items() if not n.startswith("mtp.")}
    models = {"target": Engine(target, device), "draft": Engine(draft, device)}
    parameter = models["target"].place[embedding][0]
    setattr(models["draft"], parameter, getattr(models["target"], parameter))
    return dict(models)
