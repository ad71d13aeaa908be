"""The cases of `gpu.py`: inputs, the call, and the least bytes and operations it needs.

T tokens, H key heads, U value heads, K and V their dims, C channels, D hidden, F ffn, R rotated features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import relax_kernels as rk
import torch

BF16 = torch.bfloat16
Peer = Callable[..., torch.Tensor]
"""Takes the inputs by position, returns the first result."""


@dataclass(frozen=True)
class Case:
    name: str
    op: str
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    """Tensors the call takes by position; floats get gradients."""
    options: dict[str, Any] = field(default_factory=dict)
    forward_bytes: float = 0.0
    """Every input read once, every output written once."""
    both_bytes: float = 0.0
    """As much for the forward and the backward pass."""
    forward_flops: float = 0.0
    both_flops: float = 0.0
    allowed: float = 2e-2
    """Largest difference from the float32 reference, as a fraction of its largest value."""
    backward: bool = True
    """Whether the operator has a backward pass."""
    peers: Mapping[str, Peer] = field(default_factory=dict)
    """What a user would run instead, by name; may raise ImportError where it is not installed."""

    def run(self, backend: str, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Call the operator; return the tensors of its result."""
        result = getattr(rk, self.op)(*inputs, backend=backend, **self.options)
        results = result if isinstance(result, tuple) else (result,)
        return tuple(x for x in results if x is not None)


def normal(*shape: int, seed: int = 0, size: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * size).to(dtype)


def delta_rule(lengths: tuple[int, ...], H: int = 16, U: int = 32, K: int = 128, V: int = 128) -> Case:
    T = sum(lengths)

    def inputs() -> tuple[torch.Tensor, ...]:
        q, k, v = normal(T, H, K, seed=1), normal(T, H, K, seed=2), normal(T, U, V, seed=3)
        g = -0.2 * torch.nn.functional.softplus(normal(T, U, seed=4, dtype=torch.float32))
        return q, k, v, g, torch.sigmoid(normal(T, U, seed=5))

    keys, values = 2 * T * H * K, 2 * T * U * V
    # Products of one chunk of 64 and one value head, those that every chunked algorithm has.
    chunk = 2 * 64 * (3 * K * V + 64 * (K + 2 * V))
    forward = chunk * U * T / 64
    return Case(
        f"gated_delta_rule {'x'.join(map(str, _short(lengths)))} heads {H}/{U} dim {K}",
        "gated_delta_rule",
        inputs,
        {"cu_seqlens": rk.CuSeqlens.from_lengths(lengths)},
        forward_bytes=2 * keys + 2 * values,
        both_bytes=2 * keys + 2 * values + 4 * keys + 3 * values,
        forward_flops=forward,
        both_flops=3 * forward,
        peers={"fla": partial(_fla_delta_rule, lengths)},
    )


def _fla_delta_rule(lengths: tuple[int, ...], *inputs: torch.Tensor) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    ends = torch.tensor((0, *lengths), device="cuda").cumsum(0)
    q, k, v, g, beta = (x.unsqueeze(0) for x in inputs)
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)
    return o.squeeze(0)


def _fla_conv(ends: tuple[int, ...], x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
    from fla.modules.causal_conv1d import causal_conv1d

    cu_seqlens = torch.tensor(ends, device="cuda")
    y, _ = causal_conv1d(x_TC.unsqueeze(0), weight_CW, activation="silu", cu_seqlens=cu_seqlens)
    return y.squeeze(0)


def _torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, 1 + weight, 1e-6)


def _short(lengths: tuple[int, ...]) -> tuple[int, int]:
    return len(lengths), lengths[0]


def logprob(T: int, D: int, V: int) -> Case:
    def inputs() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(3)
        target = torch.randint(0, V, (T,), generator=generator, device="cuda")
        return normal(T, D, seed=1), normal(V, D, seed=2, size=D**-0.5), target

    product = 2.0 * T * D * V
    return Case(
        f"linear_logprob {T} x {D} x {V}",
        "linear_logprob",
        inputs,
        {"with_entropy": True},
        forward_flops=product,
        both_flops=3 * product,
    )


def attention(lengths: tuple[int, ...], H: int, G: int, D: int) -> Case:
    T = sum(lengths)
    flops = sum(2.0 * n * n * D * H for n in lengths)
    return Case(
        f"attention {'x'.join(map(str, _short(lengths)))} heads {H}/{G} dim {D}",
        "attention",
        lambda: (normal(T, H, D, seed=1), normal(T, G, D, seed=2), normal(T, G, D, seed=3)),
        {"cu_seqlens_q": rk.CuSeqlens.from_lengths(lengths)},
        forward_flops=flops,
        both_flops=3.5 * flops,
    )


def small(T: int) -> Iterator[Case]:
    """Operators bounded by memory. Bytes per element of x: 2 to read it, 2 to write the result."""

    def case(
        name: str,
        op: str,
        shapes: tuple[tuple[int, ...], ...],
        forward: float,
        both: float,
        peers: Mapping[str, Peer] | None = None,
        **options: Any,
    ) -> Case:
        def inputs() -> tuple[torch.Tensor, ...]:
            return tuple(normal(*shape, seed=seed) for seed, shape in enumerate(shapes))

        return Case(name, op, inputs, options, 2 * forward, 2 * both, peers=peers or {})

    hidden = T * 4096
    norm = ((T, 4096), (4096,))
    torch_norm = {"torch": _torch_norm}
    yield case(
        "rms_norm 4096", "rms_norm", norm, 2 * hidden, 5 * hidden, torch_norm, eps=1e-6, zero_centred=True
    )
    added = ((T, 4096), (T, 4096), (4096,))
    yield case(
        "add_rms_norm 4096", "add_rms_norm", added, 4 * hidden, 8 * hidden, eps=1e-6, zero_centred=True
    )
    heads = ((T, 32, 128), (T, 32, 128), (128,))
    yield case("gated_rms_norm 32 x 128", "gated_rms_norm", heads, 3 * hidden, 8 * hidden, eps=1e-6)
    gates = ((T, 32), (T, 32), (32,), (32,))
    yield case("delta_gates 32", "delta_gates", gates, 5 * T * 32, 12 * T * 32)
    channels = ((T, 8192), (8192, 4))
    cu = rk.CuSeqlens.from_lengths((T // 2, T // 4, T // 4 - 1, 1))
    fla = {"fla": partial(_fla_conv, cu.host)}
    yield case(
        "causal_conv1d 8192 x 4", "causal_conv1d", channels, 4 * hidden, 10 * hidden, fla, cu_seqlens=cu
    )
    yield case("swiglu 12288", "swiglu", ((T, 24576),), 9 * hidden, 24 * hidden)
    gated = ((T, 16, 256), (T, 16, 256))
    yield case("output_gate 16 x 256", "output_gate", gated, 3 * hidden, 8 * hidden)


def rotary(T: int, H: int, D: int, R: int) -> Case:
    cos, sin = rk.rotary_cos_sin(torch.arange(T, device="cuda"), dim=R, base=1e7)
    size = 2.0 * T * H * D
    return Case(
        f"rotary {H} x {D}, {R} rotated",
        "rotary",
        lambda: (normal(T, H, D),),
        {"cos_TR": cos, "sin_TR": sin},
        2 * size,
        4 * size,
    )


def experts(T: int, E: int, K: int, D: int, F: int) -> Iterator[Case]:
    """A layer of experts: the router's choice, rows out and back, and both products."""
    P = T * K

    def logits() -> torch.Tensor:
        return normal(T, E, seed=1, dtype=torch.float32)

    def permutation() -> rk.Permutation:
        return rk.sort_by_expert(rk.router_topk(logits(), top_k=K).expert_TK, experts=E)

    named = f"{E} experts top-{K}, {T} tokens"
    yield Case(
        f"router_topk {named}", "router_topk", lambda: (logits(),), {"top_k": K}, 4 * T * E, 12 * T * E
    )
    moved = 2.0 * (T + P) * D
    yield Case(
        f"permute_tokens {named} x {D}",
        "permute_tokens",
        lambda: (normal(T, D, seed=2), permutation()),
        {},
        moved,
        2 * moved,
    )
    yield Case(
        f"unpermute_tokens {named} x {D}",
        "unpermute_tokens",
        lambda: (normal(P, D, seed=2), permutation(), rk.router_topk(logits(), top_k=K).weight_TK.detach()),
        {},
        moved,
        2 * moved + 2.0 * P * D,
    )
    for inner, outer in ((D, 2 * F), (F, D)):
        product = 2.0 * P * inner * outer
        yield Case(
            f"grouped_matmul {named}, {inner} -> {outer}",
            "grouped_matmul",
            lambda inner=inner, outer=outer: (
                normal(P, inner, seed=1),
                normal(E, outer, inner, seed=2, size=inner**-0.5),
                permutation().count_E,
            ),
            forward_flops=product,
            both_flops=3 * product,
        )


def decoding(N: int) -> Iterator[Case]:
    """One token of each of N sequences."""
    states = 2 * 4.0 * N * 32 * 128 * 128
    yield Case(
        f"gated_delta_rule_step {N} sequences, heads 16/32 dim 128",
        "gated_delta_rule_step",
        lambda: (
            *(normal(N, heads, 128, seed=heads) for heads in (16, 16, 32)),
            -torch.rand(N, 32, device="cuda"),
            torch.rand(N, 32, device="cuda"),
            normal(N, 32, 128, 128, seed=4, dtype=torch.float32),
        ),
        forward_bytes=states,
        backward=False,
    )
    yield Case(
        f"causal_conv1d_step {N} sequences, 8192 x 4",
        "causal_conv1d_step",
        lambda: (normal(N, 8192, seed=1), normal(N, 8192, 3, seed=2), normal(8192, 4, seed=3)),
        forward_bytes=2.0 * N * 8192 * 8,
        backward=False,
    )


def cases() -> Iterator[Case]:
    yield delta_rule((4096,) * 8)
    yield delta_rule((32768,))
    yield delta_rule((8192,))
    yield delta_rule((4096,) * 8, K=64, V=64)
    yield from small(32768)
    yield rotary(32768, 16, 256, 64)
    yield attention((4096,) * 8, 16, 4, 256)
    yield logprob(8192, 4096, 248320)
    yield from experts(16384, 256, 8, 2048, 512)
    yield from decoding(256)
