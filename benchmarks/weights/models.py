"""Shapes of Qwen3.5 models of 2B and 4B, and a plain module that fuses them as an engine does.

Rows of fused matrices: qkv is [query with gate; key; value], gate_up [gate; up], qkvz [q, k, v; z], ba
[b; a].
"""

from collections.abc import Iterator

import torch
from torch import nn

SIZES = {
    "tiny": {
        "hidden": 64, "layers": 4, "ffn": 96, "heads": 2, "kv": 1, "k_heads": 2, "v_heads": 2, "vocab": 512,
    },
    "2B": {
        "hidden": 2048, "layers": 24, "ffn": 6144, "heads": 8, "kv": 2, "k_heads": 16, "v_heads": 16,
        "vocab": 248320,
    },
    "4B": {
        "hidden": 2560, "layers": 32, "ffn": 9216, "heads": 16, "kv": 4, "k_heads": 16, "v_heads": 32,
        "vocab": 248320,
    },
}  # fmt: skip
HEAD, LINEAR_HEAD = 256, 128


def layer(n: int, s: dict[str, int]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name in the checkpoint, parameter that holds it, shape), parts of a parameter in their order."""
    at, h = f"model.layers.{n}", s["hidden"]
    yield f"{at}.input_layernorm.weight", f"{n}.norm1", (h,)
    yield f"{at}.post_attention_layernorm.weight", f"{n}.norm2", (h,)
    yield f"{at}.mlp.gate_proj.weight", f"{n}.gate_up", (s["ffn"], h)
    yield f"{at}.mlp.up_proj.weight", f"{n}.gate_up", (s["ffn"], h)
    yield f"{at}.mlp.down_proj.weight", f"{n}.down", (h, s["ffn"])
    if n % 4 == 3:
        yield f"{at}.self_attn.q_proj.weight", f"{n}.qkv", (2 * s["heads"] * HEAD, h)
        yield f"{at}.self_attn.k_proj.weight", f"{n}.qkv", (s["kv"] * HEAD, h)
        yield f"{at}.self_attn.v_proj.weight", f"{n}.qkv", (s["kv"] * HEAD, h)
        yield f"{at}.self_attn.o_proj.weight", f"{n}.o", (h, s["heads"] * HEAD)
        yield f"{at}.self_attn.q_norm.weight", f"{n}.q_norm", (HEAD,)
        yield f"{at}.self_attn.k_norm.weight", f"{n}.k_norm", (HEAD,)
        return
    key, value = s["k_heads"] * LINEAR_HEAD, s["v_heads"] * LINEAR_HEAD
    yield f"{at}.linear_attn.in_proj_qkv.weight", f"{n}.qkvz", (2 * key + value, h)
    yield f"{at}.linear_attn.in_proj_z.weight", f"{n}.qkvz", (value, h)
    yield f"{at}.linear_attn.in_proj_b.weight", f"{n}.ba", (s["v_heads"], h)
    yield f"{at}.linear_attn.in_proj_a.weight", f"{n}.ba", (s["v_heads"], h)
    yield f"{at}.linear_attn.conv1d.weight", f"{n}.conv", (2 * key + value, 1, 4)
    yield f"{at}.linear_attn.A_log", f"{n}.A_log", (s["v_heads"],)
    yield f"{at}.linear_attn.dt_bias", f"{n}.dt_bias", (s["v_heads"],)
    yield f"{at}.linear_attn.norm.weight", f"{n}.norm3", (LINEAR_HEAD,)
    yield f"{at}.linear_attn.out_proj.weight", f"{n}.out", (h, value)


def tensors(size: str) -> list[tuple[str, str, tuple[int, ...]]]:
    s = SIZES[size]
    listed = [("model.embed_tokens.weight", "embed", (s["vocab"], s["hidden"]))]
    for n in range(s["layers"]):
        listed += layer(n, s)
    return [*listed, ("model.norm.weight", "norm", (s["hidden"],))]


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16


class Engine(nn.Module):
    """Parameters as an engine fuses them, and a loader that copies a checkpoint's tensors into them."""

    def __init__(self, size: str, device: torch.device) -> None:
        super().__init__()
        self.place: dict[str, tuple[str, int, int]] = {}
        rows: dict[str, int] = {}
        rest: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, parameter, shape in tensors(size):
            start = rows.get(parameter, 0)
            self.place[name] = (parameter, start, shape[0])
            rows[parameter] = start + shape[0]
            rest[parameter] = (shape[1:], dtype_of(name))
        self.held = {
            name: torch.zeros((rows[name], *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in rest.items()
        }
        for name, tensor in self.held.items():
            self.register_buffer(name.replace(".", "_"), tensor)

    def load_weights(self, weights):
        for name, tensor in weights:
            parameter, start, count = self.place[name]
            self.held[parameter].narrow(0, start, count).copy_(tensor)
