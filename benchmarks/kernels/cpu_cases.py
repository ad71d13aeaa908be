"""The cases of `cpu.py`: inputs, our call, and the same by transformers.

T tokens, H heads, K and V head dims, C channels, D hidden, F ffn; short packs are 256 sequences of 12 to 20
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import relax_kernels as rk
import torch
import torch.nn.functional as F
import transformers
from relax_kernels import CuSeqlens
from transformers.models.qwen3_5 import modeling_qwen3_5 as peer

SHORT = tuple(12 + 5 * i % 9 for i in range(256))
VERSION = f"transformers {transformers.__version__}"
Run = Callable[..., Sequence[torch.Tensor]]


@dataclass
class Case:
    name: str
    inputs: tuple[torch.Tensor, ...]
    ours: Run
    peer: Run
    peer_name: str
    allowed: float = 1e-4
    """Largest difference, as a fraction of the largest value."""


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def padded(x_T: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(x_T.split(list(lengths))), batch_first=True)


def unpadded(x_BT: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    return torch.cat([x[:length] for x, length in zip(x_BT, lengths, strict=True)])


def delta_rule(name: str, lengths: Sequence[int], H: int, K: int) -> Case:
    cu = CuSeqlens.from_lengths(lengths)
    T = cu.total
    q, k, v = (normal(T, H, K, seed=seed) for seed in range(3))
    g = (-0.2 * F.softplus(normal(T, H, seed=3))).detach().requires_grad_()
    beta = torch.sigmoid(normal(T, H, seed=4)).detach().requires_grad_()

    def ours(*x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (rk.gated_delta_rule(*x, cu_seqlens=cu)[0],)

    def theirs(*x: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = [padded(y, lengths) for y in x]
        o, _ = peer.torch_chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True)
        return (unpadded(o, lengths),)

    return Case(name, (q, k, v, g, beta), ours, theirs, f"{VERSION} torch_chunk_gated_delta_rule")


def conv(name: str, lengths: Sequence[int], C: int) -> Case:
    cu = CuSeqlens.from_lengths(lengths)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return (rk.causal_conv1d(x, weight, cu_seqlens=cu)[0],)

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = padded(x, lengths).transpose(1, 2)
        y = F.silu(F.conv1d(rows, weight[:, None], padding=3, groups=C)[..., : rows.shape[-1]])
        return (unpadded(y.transpose(1, 2), lengths),)

    inputs = (normal(cu.total, C, seed=1), normal(C, 4, seed=2))
    return Case(name, inputs, ours, theirs, f"{VERSION} conv1d and silu of Qwen3_5GatedDeltaNet")


def attention(name: str, lengths: Sequence[int], H: int, G: int, D: int) -> Case:
    cu = CuSeqlens.from_lengths(lengths)

    def ours(*x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (rk.attention(*x, cu_seqlens_q=cu),)

    def theirs(*x: torch.Tensor) -> Sequence[torch.Tensor]:
        q, k, v = (padded(y, lengths).transpose(1, 2) for y in x)
        k, v = (peer.repeat_kv(y, H // G) for y in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (unpadded(o.transpose(1, 2), lengths),)

    inputs = (normal(cu.total, H, D, seed=1), normal(cu.total, G, D, seed=2), normal(cu.total, G, D, seed=3))
    return Case(name, inputs, ours, theirs, f"{VERSION} sdpa attention, padded")


def norm(name: str, rows: int, D: int) -> Case:
    module = peer.Qwen3_5RMSNorm(D)
    module.weight.data.normal_()

    def ours(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (rk.rms_norm(x, module.weight, eps=module.eps, zero_centred=True),)

    return Case(name, (normal(rows, D, seed=1),), ours, lambda x: (module(x),), f"{VERSION} Qwen3_5RMSNorm")


def gated_norm(name: str, rows: int, D: int) -> Case:
    module = peer.Qwen3_5RMSNormGated(D)
    module.weight.data.normal_()

    def ours(x: torch.Tensor, z: torch.Tensor) -> Sequence[torch.Tensor]:
        return (rk.gated_rms_norm(x, z, module.weight, eps=module.variance_epsilon),)

    inputs = (normal(rows, D, seed=1), normal(rows, D, seed=2))
    return Case(name, inputs, ours, lambda x, z: (module(x, z),), f"{VERSION} Qwen3_5RMSNormGated")


def rotary(name: str, T: int, H: int, D: int, R: int) -> Case:
    cos, sin = rk.rotary_cos_sin(torch.arange(T), dim=R, base=1e7)

    def ours(q: torch.Tensor, k: torch.Tensor) -> Sequence[torch.Tensor]:
        return rk.rotary(q, cos, sin), rk.rotary(k, cos, sin)

    def theirs(q: torch.Tensor, k: torch.Tensor) -> Sequence[torch.Tensor]:
        return peer.apply_rotary_pos_emb(q, k, cos, sin)

    inputs = (normal(T, H, D, seed=1), normal(T, H, D, seed=2))
    return Case(name, inputs, ours, theirs, f"{VERSION} apply_rotary_pos_emb")


def swiglu(name: str, T: int, width: int) -> Case:
    def theirs(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (F.silu(x[:, :width]) * x[:, width:],)

    inputs = (normal(T, 2 * width, seed=1),)
    return Case(name, inputs, lambda x: (rk.swiglu(x),), theirs, f"{VERSION} act_fn(gate) * up of Qwen3_5MLP")


def logprob(name: str, T: int, D: int, V: int, without_target: float) -> Case:
    generator = torch.Generator().manual_seed(5)
    target = torch.randint(0, V, (T,), generator=generator)
    target[torch.rand(T, generator=generator) < without_target] = -1

    def ours(*x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (rk.linear_logprob(*x, target).logprob_T,)

    def theirs(hidden: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        logits = (hidden @ weight.T).float()
        return (-F.cross_entropy(logits, target, ignore_index=-1, reduction="none"),)

    inputs = (normal(T, D, seed=1), normal(V, D, seed=2))
    return Case(name, inputs, ours, theirs, f"{VERSION} lm_head and cross_entropy")


def cases() -> dict[str, Callable[[], Case]]:
    """Return the cases by name, unmade."""
    makers: dict[str, tuple[Callable[..., Case], tuple[object, ...]]] = {
        "gated_delta_rule [1, 1024, 8, 64]": (delta_rule, ([1024], 8, 64)),
        "gated_delta_rule [1, 1024, 4, 128]": (delta_rule, ([1024], 4, 128)),
        "gated_delta_rule [4, 256, 8, 32]": (delta_rule, ([256] * 4, 8, 32)),
        "gated_delta_rule short pack, 8 heads of 32": (delta_rule, (SHORT, 8, 32)),
        "causal_conv1d [1, 1024, 1536]": (conv, ([1024], 1536)),
        "causal_conv1d short pack, 768 channels": (conv, (SHORT, 768)),
        "attention [1, 1024, 4, 64], 2 key heads": (attention, ([1024], 4, 2, 64)),
        "attention short pack, 4 heads of 32, 2 key heads": (attention, (SHORT, 4, 2, 32)),
        "rms_norm [4096, 128]": (norm, (4096, 128)),
        "gated_rms_norm [32768, 32]": (gated_norm, (32768, 32)),
        "rotary [4096, 4, 32], 8 rotated": (rotary, (4096, 4, 32, 8)),
        "swiglu [4096, 768]": (swiglu, (4096, 384)),
        "linear_logprob [4096, 128] x 512": (logprob, (4096, 128, 512, 0.0)),
        "linear_logprob [1024, 128] x 32768, half without target": (logprob, (1024, 128, 32768, 0.5)),
    }
    return {name: partial(make, name, *arguments) for name, (make, arguments) in makers.items()}
