"""The tiny models and the samples that layouts are compared on."""

import json
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from relax_bridge import Checkpoint, model_map, write_checkpoint
from relax_rollout.pictures import Picture, PlacedPicture

from relax_core.model.placement import AdapterEntry, Part, tensor_ranks
from relax_core.testing.row import Row
from relax_core.trainer.sample import Sample

STEPS = 3
_VOCABULARY = 96
# Lengths and trailing targets of the samples of each step: samples without a target, of one token, of several
# packed rows; the second step has a single sample, so that other data-parallel ranks have none and most
# context-parallel pieces no target; in the third all targets lie in two short samples.
_STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((9, 4), (1, 0), (17, 16), (5, 0), (12, 3), (23, 20), (2, 1), (6, 2), (30, 11)),
    ((19, 2),),
    ((25, 0), (4, 3), (1, 0), (16, 0), (7, 6)),
)


def model_config(row: Row) -> dict[str, Any]:
    """A Hugging Face `config.json` of the row's model; all sizes differ."""
    config: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "vocab_size": _VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": row.layers,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": row.mtp,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }
    if row.family == "moe":
        del config["intermediate_size"]
        config |= {
            "model_type": "qwen3_5_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
        }
    config |= dict(row.model)
    return config if row.pictures == "none" else _with_tower(config)


_IMAGE_TOKEN = 90


def _with_tower(text: dict[str, Any]) -> dict[str, Any]:
    """The config of a model with vision around that of its text model."""
    text["rope_parameters"]["mrope_section"] = [2, 1, 1]
    return {
        "model_type": text["model_type"].removesuffix("_text"),
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": _IMAGE_TOKEN,
        "text_config": text,
        "vision_config": {
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
    }


def _pictures(length: int, generator: torch.Generator) -> tuple[PlacedPicture, ...]:
    """One picture in a sample of some length, two in a long one; none in others."""
    grids = [(1, 2, 2)] if length < 5 else [(1, 4, 2)] if length < 20 else [(1, 2, 6), (1, 4, 6)]
    placed, at = [], 1
    for grid in grids:
        patches = torch.randn(grid[1] * grid[2], 24, generator=generator).numpy()
        picture = Picture.of(patches, grid, merge=2, channels=3, frames=2)
        if at + picture.tokens > length or length % 4 == 0:
            break
        placed.append(PlacedPicture(picture, at))
        at += picture.tokens + 2
    return tuple(placed)


def step_samples(row: Row) -> list[list[Sample]]:
    """The samples of every optimizer step, with the columns that the row's objective reads."""
    generator = torch.Generator().manual_seed(1)

    def column(length: int) -> torch.Tensor:
        return torch.randn(length, generator=generator)

    steps = []
    for shapes in _STEPS:
        samples = []
        partner = [(11, 5)] if row.objective == "dpo" and len(shapes) % 2 else []
        for group, (length, targets) in enumerate([*shapes, *partner]):
            mask_L = torch.zeros(length)
            mask_L[length - targets :] = 1
            tokens_L = torch.randint(0, _VOCABULARY, (length,), generator=generator)
            columns = {
                "advantage": column(length),
                "rollout_logprob": column(length) * 0.3 - 4.5,
                "old_logprob": column(length) * 0.3 - 4.5,
                "ref_logprob": column(length) * 0.3 - 4.5,
                "value": column(length) * 0.3,
                "value_target": column(length),
            }
            pictures = () if row.pictures == "none" else _pictures(length, generator)
            for one in pictures:
                tokens_L[one.start : one.start + one.picture.tokens] = _IMAGE_TOKEN
            columns = {} if row.objective == "sft" else columns
            samples.append(Sample(tokens_L, mask_L, group // 2, columns, pictures))
        steps.append(samples)
    return steps


@contextmanager
def initial_checkpoint(config: dict[str, Any]) -> Iterator[Checkpoint]:
    """A checkpoint of a config with `full_weights`, as long as the block lasts."""
    table = model_map(config, vision="vision_config" in config)
    tensors = table.export_tensors(full_weights(table.megatron_shapes()))
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(config))
        bare = Checkpoint.open(directory, weights=False)
        yield Checkpoint.open(write_checkpoint(directory / "initial", tensors, like=bare))


def full_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Random weights by name, the same in every process: every gradient matters, and none explodes.

    They are numbers of bfloat16, so that a model of either precision starts from the same.
    """
    generator = torch.Generator().manual_seed(11)
    return {
        name: (torch.randn(shape, generator=generator) * _spread(name)).bfloat16().float()
        for name, shape in shapes.items()
    }


@torch.no_grad()
def fill_adapter(part: Part, entry: AdapterEntry, rank: int) -> None:
    """Random numbers for this rank's part of an adapter, the same however ranks share it.

    Both matrices: with B at 0, as adapters start, nothing would depend on A.
    """
    outputs, inputs = entry.weight.megatron_shape
    shape = (rank, inputs) if "lora_A" in entry.megatron else (outputs, rank)
    generator = torch.Generator().manual_seed(zlib.crc32(entry.megatron.encode()))
    whole = torch.randn(shape, generator=generator) * 0.1
    group = tensor_ranks(entry)
    part.of(part.parameter).copy_(entry.partition.shard(whole, group.rank(), group.size()))


def _spread(name: str) -> float:
    if name.startswith("embedding"):
        return 1.0
    if "norm" in name or name.endswith(("A_log", "dt_bias", "conv1d.weight")):
        return 0.3
    return 0.1
