"""Numbers beside the tensors: each operator refuses what it cannot use, by name."""

from collections.abc import Callable
from typing import Any

import pytest
import relax_kernels as rk
import torch

X = torch.ones(3, 2, 4)
NONE = torch.ones(3, 2, 0)
G = torch.zeros(3, 2)
CU = rk.CuSeqlens.from_lengths((3,))
PLACES = torch.ones(3, 2, dtype=torch.int64)


def delta(x: torch.Tensor = X, **more: Any) -> object:
    return rk.gated_delta_rule(x, x, X, G, G, cu_seqlens=CU, **more)


def step(x: torch.Tensor = X, **more: Any) -> object:
    return rk.gated_delta_rule_step(x, x, X, G, G, torch.ones(3, 2, x.shape[2], 4), **more)


def attention(x: torch.Tensor = X, **more: Any) -> object:
    return rk.attention(x, x, X, cu_seqlens_q=CU, **more)


def convolution(**more: Any) -> object:
    return rk.causal_conv1d(G, G[:2], cu_seqlens=CU, **more)


def logprob(**more: Any) -> object:
    return rk.linear_logprob(G, G, torch.zeros(3, dtype=torch.int64), **more)


def angles(ids: Any = PLACES[:, 0], **more: Any) -> object:
    return rk.rotary_cos_sin(ids, **{"dim": 8, "base": 1e4, **more})


def sections(*given: Any) -> object:
    return angles(torch.ones(3, 2, dtype=torch.int64), sections=given)


def adamw(**more: Any) -> object:
    options = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, **more}
    return rk.adamw_step(*(torch.ones(4) for _ in range(4)), **options)


NAN = float("nan")
REFUSALS: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], str]] = [
    (delta, (NONE,), {}, "gated_delta_rule: q_THK has K = 0; at least 1 is needed"),
    (step, (NONE,), {}, "gated_delta_rule_step: q_NHK has K = 0"),
    (attention, (NONE,), {}, "attention: q_THD has D = 0"),
    (delta, (), {"scale": NAN}, "scale must be a finite number, given nan"),
    (step, (), {"scale": "1"}, "scale must be a finite number, given '1'"),
    (attention, (), {"scale": float("inf")}, "scale must be a finite number, given inf"),
    (logprob, (), {"temperature": "1"}, "temperature must be a finite number, given '1'"),
    (logprob, (), {"temperature": float("inf")}, "temperature must be a finite number, given inf"),
    (logprob, (), {"chunk_tokens": 2.5}, "chunk_tokens must be a whole number of at least 1, given 2.5"),
    (logprob, (), {"process_group": "tp"}, "process_group must be a torch.distributed.ProcessGroup or None"),
    (rk.router_topk, (G,), {"top_k": 2.0}, "top_k must be a whole number from 1 to E = 2, given 2.0"),
    (rk.router_topk, (G,), {"top_k": None}, "top_k must be a whole number from 1 to E = 2, given None"),
    (rk.sort_by_expert, (PLACES,), {"experts": 2.5}, "experts must be a whole number of at least 1"),
    (delta, (), {"scale": 10**30}, "scale is a whole number of more than 64 bits"),
    (attention, (), {"scale": -(10**30)}, "scale is a whole number of more than 64 bits"),
    (rk.sort_by_expert, (PLACES,), {"experts": 10**30}, "experts must be at most 9223372036854775807"),
    (delta, (), {"qk_l2norm": "no"}, "qk_l2norm must be True or False, given 'no'"),
    (delta, (), {"output_final_state": None}, "output_final_state must be True or False, given None"),
    (step, (), {"qk_l2norm": 1}, "qk_l2norm must be True or False, given 1"),
    (attention, (), {"causal": "false"}, "causal must be True or False, given 'false'"),
    (attention, (), {"return_lse": 0}, "return_lse must be True or False, given 0"),
    (convolution, (), {"output_final_state": 1.0}, "output_final_state must be True or False, given 1.0"),
    (logprob, (), {"with_entropy": "no"}, "with_entropy must be True or False, given 'no'"),
    (logprob, (), {"reduce_hidden_grad": None}, "reduce_hidden_grad must be True or False, given None"),
    (rk.router_topk, (G,), {"top_k": 1, "normalise": "no"}, "normalise must be True or False, given 'no'"),
    (rk.rms_norm, (G, G[0]), {"eps": 0.1, "zero_centred": None}, "zero_centred must be True or False"),
    (rk.add_rms_norm, (G, G, G[0]), {"eps": 0.1, "zero_centred": 1}, "zero_centred must be True or False"),
    (rk.rms_norm, (G, G[0]), {"eps": None, "zero_centred": True}, "eps must be a finite number, given None"),
    (rk.rms_norm, (G, G[0]), {"eps": float("inf"), "zero_centred": True}, "eps must be a finite number"),
    (angles, ([1, 2],), {}, "position_ids must be a tensor"),
    (angles, (), {"dim": 8.0}, "dim must be a whole number of at least 2, given 8.0"),
    (angles, (), {"base": float("inf")}, "base must be a finite number"),
    (angles, (), {"dtype": torch.int64}, "dtype must be a float, given torch.int64"),
    (sections, (6, -1, -1), {}, r"sections\[1\] must be a whole number of at least 0, given -1"),
    (sections, (2.0, 1, 1), {}, r"sections\[0\] must be a whole number"),
    (sections, (2, 1, 2), {}, r"sections must have the sum dim / 2 = 4, given \(2, 1, 2\)"),
    (adamw, (), {"step": 1.5}, "step must be a whole number of at least 1, given 1.5"),
    (adamw, (), {"lr": NAN}, "lr must be a finite number, given nan"),
    (adamw, (), {"lr": -1.0}, "lr must not be negative, given -1.0"),
    (adamw, (), {"eps": -1.0}, "eps must not be negative, given -1.0"),
    (adamw, (), {"weight_decay": None}, "weight_decay must be a finite number, given None"),
    (adamw, (), {"grad_scale": NAN}, "grad_scale must be a finite number, given nan"),
    (adamw, (), {"seed": 1.5}, "seed must be a whole number from 0 to 4294967295, given 1.5"),
    (adamw, (), {"first": 0.5}, "first must be a whole number of at least 0, given 0.5"),
    (rk.split_float32, (G.double(),), {}, "split_float32 takes torch.float32, given torch.float64"),
    (rk.join_float32, (G, PLACES), {}, "join_float32 takes torch.bfloat16, given torch.float32"),
]


@pytest.mark.parametrize(("call", "given", "named", "message"), REFUSALS, ids=[r[3][:45] for r in REFUSALS])
def test_what_cannot_be_used_is_refused_by_name(
    call: Callable[..., object], given: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    with pytest.raises(rk.InvalidInput, match=message):
        call(*given, **named)


def test_whole_numbers_of_other_libraries_are_taken() -> None:
    assert rk.router_topk(G, top_k=PLACES.numpy()[0, 0]).weight_TK.shape == (3, 1)
