"""Cases of what is packed together and must not meet: a NaN or infinity of one sequence stays in it.

Values and gradients of every other sequence keep their bits. For operators on single tokens a sequence is
some tokens; for the product of experts it is one expert's rows and weight. T tokens, S keys, N sequences, P
rows of a permutation; "." is what all share, and whose gradient may therefore be spoilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.ops.experts import Permutation
from relax_kernels.ops.rotary import rotary_cos_sin
from relax_kernels.testing.case import Case, dtype_name
from relax_kernels.testing.target import Target

LENGTHS = (70, 5, 0, 70, 3)
KEYS = (80, 5, 2, 70, 40)
T, N, TOP_K = sum(LENGTHS), len(LENGTHS), 2


@dataclass(frozen=True)
class _Call:
    inputs: Mapping[str, tuple[str, Any]]
    """Name of the argument to (what it is split along, value)."""
    results: str
    """What each result is split along."""
    options: Mapping[str, Any] = field(default_factory=dict)
    row_TK: torch.Tensor | None = None


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for name, make in CALLS.items():
        for dtype in (torch.float32, torch.bfloat16):
            op = name.split("-")[0]
            yield Case(op, f"{name}-neighbours-{dtype_name(dtype)}", partial(_check, op, make, dtype))


def _check(op: str, make: Callable[[Target, torch.dtype], _Call], dtype: torch.dtype, target: Target) -> None:
    call = make(target, dtype)
    clean = _run(target, op, call, {}, 0.0)
    for sequence in range(N):
        places = _places(call, sequence, target)
        for value in (torch.nan, torch.inf):
            for (name, axis, before), (_, _, after) in zip(
                clean, _run(target, op, call, places, value), strict=True
            ):
                if axis == ".":
                    continue
                others = torch.ones(len(before), dtype=torch.bool, device=before.device)
                others[places[axis]] = False
                same = torch.equal(before[others], after[others])
                assert same, f"{value} in sequence {sequence} of {LENGTHS} reaches {name} of another"


def _run(
    target: Target, op: str, call: _Call, places: Mapping[str, torch.Tensor], value: float
) -> list[tuple[str, str, torch.Tensor]]:
    """Return (name, axis, tensor) of results and gradients, with a value planted in a sequence's inputs and
    in the gradients of its results.
    """
    inputs = {name: _planted(x, places.get(axis), value) for name, (axis, x) in call.inputs.items()}
    result = target.run(op, **inputs, **call.options)
    outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    found = [(f"result {i}", axis, x) for i, (axis, x) in enumerate(zip(call.results, outputs, strict=True))]
    smooth = [(axis, x) for _, axis, x in found if x.requires_grad]
    weights = [
        _planted(target.normal(*x.shape, seed=50 + i, dtype=x.dtype), places.get(axis), value).detach()
        for i, (axis, x) in enumerate(smooth)
    ]
    wanted = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    grads = torch.autograd.grad([x for _, x in smooth], list(wanted.values()), weights) if wanted else ()
    found += [
        (f"the gradient of {name}", call.inputs[name][0], x) for name, x in zip(wanted, grads, strict=True)
    ]
    return [(name, axis, x.detach()) for name, axis, x in found]


def _places(call: _Call, sequence: int, target: Target) -> dict[str, torch.Tensor]:
    """Return where along each axis a sequence lies."""

    def rows(lengths: tuple[int, ...]) -> torch.Tensor:
        start = sum(lengths[:sequence])
        return torch.arange(start, start + lengths[sequence], device=target.device)

    places = {"T": rows(LENGTHS), "S": rows(KEYS), "N": torch.tensor([sequence], device=target.device)}
    if call.row_TK is not None:
        places["P"] = call.row_TK[places["T"]].flatten()
    return places


def _planted(x: Any, place: torch.Tensor | None, value: float) -> Any:
    if place is None or not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    planted = x.detach().clone()
    planted[place] = value
    return planted.requires_grad_(x.requires_grad)


def _delta_rule(dim: int, target: Target, dtype: torch.dtype) -> _Call:
    inputs = {
        "q_THK": ("T", target.normal(T, 1, dim, seed=1, dtype=dtype)),
        "k_THK": ("T", target.normal(T, 1, dim, seed=2, dtype=dtype)),
        "v_TUV": ("T", target.normal(T, 2, dim, seed=3, dtype=dtype)),
        "g_TU": ("T", target.uniform(T, 2, low=-1.0, high=0.0, seed=4)),
        "beta_TU": ("T", target.uniform(T, 2, low=0.0, high=1.0, seed=5, dtype=dtype)),
        "initial_state_NUKV": ("N", target.normal(N, 2, dim, dim, seed=6)),
    }
    options = {"cu_seqlens": CuSeqlens.from_lengths(LENGTHS), "output_final_state": True}
    return _Call(inputs, "TN", options)


def _delta_step(target: Target, dtype: torch.dtype) -> _Call:
    shapes = {
        "q_NHK": (N, 1, 64),
        "k_NHK": (N, 1, 64),
        "v_NUV": (N, 2, 64),
        "g_NU": (N, 2),
        "beta_NU": (N, 2),
        "state_NUKV": (N, 2, 64, 64),
    }
    inputs = {
        name: ("N", target.normal(*shape, seed=seed, dtype=dtype).detach())
        for seed, (name, shape) in enumerate(shapes.items())
    }
    for name in ("g_NU", "state_NUKV"):
        inputs[name] = ("N", inputs[name][1].float())
    return _Call(inputs, "NN")


def _conv_step(target: Target, dtype: torch.dtype) -> _Call:
    inputs = {
        "x_NC": ("N", target.normal(N, 24, seed=1, dtype=dtype).detach()),
        "state_NCW": ("N", target.normal(N, 24, 3, seed=2, dtype=dtype).detach()),
        "weight_CW": (".", target.normal(24, 4, seed=3, dtype=dtype).detach()),
    }
    return _Call(inputs, "NN")


def _conv(target: Target, dtype: torch.dtype) -> _Call:
    inputs = {
        "x_TC": ("T", target.normal(T, 24, seed=1, dtype=dtype)),
        "weight_CW": (".", target.normal(24, 4, seed=2, dtype=dtype)),
        "bias_C": (".", target.normal(24, seed=3, dtype=dtype)),
        "initial_state_NCW": ("N", target.normal(N, 24, 3, seed=4, dtype=dtype)),
    }
    options = {"cu_seqlens": CuSeqlens.from_lengths(LENGTHS), "output_final_state": True}
    return _Call(inputs, "TN", options)


def _attention(causal: bool, keys: tuple[int, ...] | None, target: Target, dtype: torch.dtype) -> _Call:
    S, axis = (T, "T") if keys is None else (sum(keys), "S")
    inputs = {
        "q_THD": ("T", target.normal(T, 2, 32, seed=1, dtype=dtype)),
        "k_SGD": (axis, target.normal(S, 1, 32, seed=2, dtype=dtype)),
        "v_SGE": (axis, target.normal(S, 1, 32, seed=3, dtype=dtype)),
    }
    options = {
        "cu_seqlens_q": CuSeqlens.from_lengths(LENGTHS),
        "cu_seqlens_k": None if keys is None else CuSeqlens.from_lengths(keys),
        "causal": causal,
        "return_lse": True,
    }
    return _Call(inputs, "TT", options)


def _rows(results: str, options: Mapping[str, Any], **shapes: tuple[int, ...]) -> Callable[..., _Call]:
    """Make calls whose inputs have the given shapes; what starts with T tokens is split along them."""

    def make(target: Target, dtype: torch.dtype) -> _Call:
        return _Call(
            {
                name: ("T" if shape[0] == T else ".", target.normal(*shape, seed=seed, dtype=dtype))
                for seed, (name, shape) in enumerate(shapes.items())
            },
            results,
            options,
        )

    return make


def _rotary(target: Target, dtype: torch.dtype) -> _Call:
    cos, sin = rotary_cos_sin(torch.arange(T, device=target.device), dim=16, base=1e7)
    x = target.normal(T, 2, 32, seed=1, dtype=dtype)
    return _Call({"x_THD": ("T", x), "cos_TR": (".", cos), "sin_TR": (".", sin)}, "T")


def _logprob(target: Target, dtype: torch.dtype) -> _Call:
    inputs = {
        "hidden_TD": ("T", target.normal(T, 64, seed=1, dtype=dtype)),
        "weight_VD": (".", target.normal(300, 64, seed=2, dtype=dtype)),
        "target_T": ("T", torch.arange(T, device=target.device) - 1),
    }
    return _Call(inputs, "TTTT", {"with_entropy": True, "top_k": 5})


def _fixed_head(target: Target, dtype: torch.dtype) -> _Call:
    inputs = dict(_logprob(target, dtype).inputs)
    inputs["weight_VD"] = (".", target.normal(300, 64, seed=2, dtype=dtype).detach())
    return _Call(inputs, "T")


def _permutation(target: Target) -> Permutation:
    expert = torch.randint(0, N, (T, TOP_K), generator=torch.Generator().manual_seed(1))
    order = expert.flatten().argsort(stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(T * TOP_K)).view(T, TOP_K)
    count = expert.flatten().bincount(minlength=N)
    return Permutation(*(x.to(target.device) for x in (row, order // TOP_K, count)))


def _permute(target: Target, dtype: torch.dtype) -> _Call:
    permutation = _permutation(target)
    inputs = {"x_TD": ("T", target.normal(T, 48, seed=1, dtype=dtype)), "permutation": (".", permutation)}
    return _Call(inputs, "P", {}, permutation.row_TK)


def _unpermute(target: Target, dtype: torch.dtype) -> _Call:
    permutation = _permutation(target)
    inputs = {
        "y_PD": ("P", target.normal(T * TOP_K, 48, seed=1, dtype=dtype)),
        "permutation": (".", permutation),
        "weight_TK": ("T", target.normal(T, TOP_K, seed=2, dtype=dtype)),
    }
    return _Call(inputs, "T", {}, permutation.row_TK)


def _grouped(target: Target, dtype: torch.dtype) -> _Call:
    inputs = {
        "x_PD": ("T", target.normal(T, 64, seed=1, dtype=dtype)),
        "weight_EFD": ("N", target.normal(N, 40, 64, seed=2, dtype=dtype)),
        "count_E": (".", torch.tensor(LENGTHS, device=target.device)),
    }
    return _Call(inputs, "T")


_EPS = {"eps": 1e-6}
_CENTRED = {"eps": 1e-6, "zero_centred": True}
CALLS: dict[str, Callable[[Target, torch.dtype], _Call]] = {
    "gated_delta_rule": partial(_delta_rule, 64),
    "gated_delta_rule-128": partial(_delta_rule, 128),
    "gated_delta_rule_step": _delta_step,
    "causal_conv1d": _conv,
    "causal_conv1d_step": _conv_step,
    "attention": partial(_attention, True, None),
    "attention-other-keys": partial(_attention, True, KEYS),
    "attention-not-causal": partial(_attention, False, KEYS),
    "rms_norm": _rows("T", _CENTRED, x=(T, 2, 40), weight_D=(40,)),
    "add_rms_norm": _rows("TT", _CENTRED, x=(T, 40), residual=(T, 40), weight_D=(40,)),
    "gated_rms_norm": _rows("T", _EPS, x=(T, 2, 40), gate=(T, 2, 40), weight_D=(40,)),
    "rotary": _rotary,
    "swiglu": _rows("T", {}, gate_up=(T, 96)),
    "output_gate": _rows("T", {}, x=(T, 2, 40), gate=(T, 2, 40)),
    "delta_gates": _rows("TT", {}, a_TU=(T, 6), b_TU=(T, 6), A_log_U=(6,), dt_bias_U=(6,)),
    "linear_logprob": _logprob,
    "linear_logprob-fixed": _fixed_head,
    "router_topk": _rows("TT", {"top_k": 3}, logits_TE=(T, 20)),
    "permute_tokens": _permute,
    "unpermute_tokens": _unpermute,
    "grouped_matmul": _grouped,
}
