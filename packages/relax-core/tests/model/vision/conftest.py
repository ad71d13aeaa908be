"""Tiny models with a vision tower, ours and transformers'."""

import copy

import pytest
import torch


@pytest.fixture
def vision_config(small_config) -> dict:
    """A `config.json` of a model with vision whose sizes all differ."""
    text = {**copy.deepcopy(small_config), "vocab_size": 96}
    text["rope_parameters"]["mrope_section"] = [2, 1, 1]
    return {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "image_token_id": 90,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 2,
            "hidden_size": 24,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 20,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
    }


@pytest.fixture
def hf_vision_model():
    """Makes transformers' model with random weights, none of them trivial."""

    def make(config: dict):
        from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

        torch.manual_seed(3)
        made = Qwen3_5Config(**copy.deepcopy(config), attn_implementation="eager")
        model = Qwen3_5ForConditionalGeneration(made)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    parameter.copy_(torch.rand_like(parameter) * 3 - 3)
                elif "visual" in name:
                    parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.3))
                elif "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
                elif name.endswith("dt_bias"):
                    parameter.copy_(torch.randn_like(parameter))
                else:
                    wide = name.endswith(("conv1d.weight", "in_proj_qkv.weight", "embed_tokens.weight"))
                    parameter.copy_(torch.randn_like(parameter) * (0.4 if wide else 0.06))
        return model

    return make


@pytest.fixture
def copy_tower():
    """Gives our tower the weights of transformers', name by name."""

    def copy_weights(ours, theirs) -> None:
        weights = dict(theirs.named_parameters())
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                parameter.copy_(weights[name])

    return copy_weights
