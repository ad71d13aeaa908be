"""Sizes of published models, as much of their `config.json` as shapes tensors.

Sources: the public model configs (Qwen/Qwen3.5-*, Qwen/Qwen3-*); a vision checkpoint's text config, with the
top-level flag `tie_word_embeddings`. `relax-bridge map Qwen3.5-9B` prints a table from these, with no file at
hand.
"""

from typing import Any

_QWEN35: dict[str, Any] = {
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "mtp_num_hidden_layers": 1,
}


def _dense(
    hidden: int, ffn: int, layers: int, heads: int, groups: int, value_heads: int, *, tied: bool
) -> dict[str, Any]:
    text = _QWEN35 | {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "linear_num_value_heads": value_heads,
    }
    return {"model_type": "qwen3_5", "tie_word_embeddings": tied, "text_config": text}


def _moe(hidden: int, ffn: int, experts: int, layers: int, heads: int, value_heads: int) -> dict[str, Any]:
    text = _QWEN35 | {
        "hidden_size": hidden,
        "moe_intermediate_size": ffn,
        "shared_expert_intermediate_size": ffn,
        "num_experts": experts,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "linear_num_value_heads": value_heads,
    }
    return {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": text}


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": _dense(1024, 3584, 24, 8, 2, 16, tied=True),
    "Qwen3.5-2B": _dense(2048, 6144, 24, 8, 2, 16, tied=True),
    "Qwen3.5-4B": _dense(2560, 9216, 32, 16, 4, 32, tied=True),
    "Qwen3.5-9B": _dense(4096, 12288, 32, 16, 4, 32, tied=False),
    "Qwen3.5-27B": _dense(5120, 17408, 64, 24, 4, 48, tied=False),
    "Qwen3.5-35B-A3B": _moe(2048, 512, 256, 40, 16, 32),
    "Qwen3.5-122B-A10B": _moe(3072, 1024, 256, 48, 32, 64),
    "Qwen3.5-397B-A17B": _moe(4096, 1024, 512, 60, 32, 64),
}

_QWEN3: dict[str, Any] = {"vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": False}
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _QWEN3
    | {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "Qwen3-Next-80B-A3B": _QWEN35
    | {
        "model_type": "qwen3_next",
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
    },
}
KNOWN = PUBLISHED | OTHERS
