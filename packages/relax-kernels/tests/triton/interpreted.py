"""Run the triton kernels in Triton's interpreter on the CPU; exits 0 if they agree.

    python interpreted.py operators  # against the torch backend, in small pieces
    python interpreted.py cases      # parity cases
    python interpreted.py ranks      # the vocabulary over two ranks against the torch backend on one

A program of its own: the interpreter is chosen when kernels are defined. Float32, which the backend does not
serve everywhere on a device, because the interpreter multiplies neither bfloat16 nor in tf32.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable, Container, Iterable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from relax_kernels import AdamShard, AdamShards, CuSeqlens, join_float32, sort_by_expert
from relax_kernels.testing import Case, Target, assert_near, grads_of, parity_cases
from relax_kernels.testing.adam_cases import OPTIONS
from relax_kernels.testing.case import dtype_name
from relax_kernels.testing.delta_rule_cases import closing_gate_cases
from relax_kernels.torch_backend import backend as torch_backend
from relax_kernels.triton_backend import (
    conv,
    delta_gates,
    experts,
    logprob,
    logprob_fixed,
    logprob_slices,
    norms,
)
from relax_kernels.triton_backend.backend import TritonBackend
from triton.runtime import interpreter

TARGET = Target("torch", "cpu")
LENGTHS = CuSeqlens.from_lengths((65, 0, 3, 30))
# Kernels whose tiles hold tokens of several sequences; in the others a program has one token's.
TILED = (
    "gated_delta_rule",
    "causal_conv1d",
    "linear_logprob",
    "rms_norm",
    "add_rms_norm",
    "gated_rms_norm",
    "rotary",
    "swiglu",
    "output_gate",
    "delta_gates",
)
EXPERTS = sort_by_expert(torch.randint(0, 5, (98, 2), generator=torch.Generator().manual_seed(1)), experts=5)


def accept_arrays_of_one() -> None:
    """Let the interpreter take one-element arrays as loop bounds, which NumPy 2.4 refuses to turn into
    numbers.
    """
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def check_cases(cases: Iterable[Case]) -> None:
    """Run parity cases on the triton backend, which serves the CPU and all dtypes from now on."""
    TritonBackend.device_types = frozenset({"cpu"})
    TritonBackend.refusal = lambda self, call: None
    for case in cases:
        case.check(Target("triton", "cpu"))
        print(case.name, "agrees", flush=True)


def calls() -> dict[str, tuple[tuple[torch.Tensor | None, ...], dict[str, Any]]]:
    normal = partial(TARGET.normal)
    T = LENGTHS.total
    g = TARGET.uniform(T, 4, low=-1.0, high=0.0, seed=4)
    beta = TARGET.uniform(T, 4, low=0.0, high=1.0, seed=5)
    heads = [normal(T, n, d, seed=n + d) for n, d in ((2, 32), (2, 32), (4, 16))]
    rule = {"cu_seqlens": LENGTHS, "output_final_state": True, "qk_l2norm": True, "scale": 0.2}
    convolve = {"cu_seqlens": LENGTHS, "activation": "silu", "output_final_state": True}
    head = {
        "temperature": 0.7,
        "with_entropy": True,
        "top_k": 900,
        "all_targets": False,
        "chunk_tokens": None,
        "process_group": None,
    }
    target_T = torch.arange(13) * 70 - 1
    turn = normal(T, 8, seed=1).detach()
    steps = [x[:3] for x in (*heads, g, beta)]
    adam = (normal(3000, seed=seed).detach() for seed in range(3))
    square, rest = normal(3000, seed=3).detach().square(), torch.arange(3000) * 20 - 30000
    return {
        "adamw_step": (
            (*(x.bfloat16() for x in (*adam, square)), rest.to(torch.int16)),
            {"step": 3, "grad_scale": 0.5, "seed": 2**32 - 5, "first": 2**32 + 77, **OPTIONS},
        ),
        "adamw_steps": ((adam_shards(),), {"step": 3, "grad_scale": 0.5, **OPTIONS}),
        "adamw_steps of a scale on the device": (
            (adam_shards(),),
            {"step": 3, "grad_scale": torch.tensor(0.5), **OPTIONS},
        ),
        "adamw_steps that are left out": (
            (adam_shards(),),
            {"step": 3, "grad_scale": torch.tensor(torch.nan), **OPTIONS},
        ),
        "gated_delta_rule": (
            (*heads, g, beta),
            {**rule, "initial_state_NUKV": normal(4, 4, 32, 16, seed=6)},
        ),
        "causal_conv1d": (
            (normal(T, 20, seed=1), normal(20, 4, seed=2), normal(20, seed=3)),
            {**convolve, "initial_state_NCW": normal(4, 20, 3, seed=4)},
        ),
        "rms_norm": ((normal(5, 7, 40, seed=1), normal(40, seed=2)), {"eps": 1e-6, "zero_centred": True}),
        "gated_rms_norm": ((normal(9, 40, seed=1), normal(9, 40, seed=2), normal(40, seed=3)), {"eps": 1e-6}),
        "swiglu": ((normal(5, 3000, seed=1),), {}),
        "output_gate": ((normal(5, 3, 40, seed=1), normal(5, 3, 40, seed=2)), {}),
        "rotary": ((normal(T, 2, 12, seed=2), turn, turn.flip(0)), {}),
        "linear_logprob": (
            (normal(13, 16, seed=1), normal(1000, 16, seed=2), target_T),
            {**head, "reduce_hidden_grad": True},
        ),
        "linear_logprob of a fixed head": (
            (normal(13, 16, seed=1), normal(1000, 16, seed=2).detach(), target_T),
            {**head, "with_entropy": False, "top_k": None, "reduce_hidden_grad": True},
        ),
        "linear_logprob of targets alone": (
            (normal(13, 16, seed=1), normal(1000, 16, seed=2), target_T.clamp(min=0)),
            {**head, "all_targets": True, "reduce_hidden_grad": True},
        ),
        "add_rms_norm": (
            (normal(5, 7, 40, seed=1), normal(5, 7, 40, seed=2), normal(40, seed=3)),
            {"eps": 1e-6, "zero_centred": True},
        ),
        "delta_gates": (
            (normal(T, 6, seed=1), normal(T, 6, seed=2), normal(6, seed=3), normal(6, seed=4)),
            {},
        ),
        "router_topk": ((normal(9, 20, seed=1),), {"top_k": 3, "normalise": True}),
        "permute_tokens": ((normal(T, 40, seed=1), EXPERTS), {}),
        "unpermute_tokens": ((normal(2 * T, 40, seed=1), EXPERTS, normal(T, 2, seed=2)), {}),
        "gated_delta_rule_step": (
            (*(x.detach() for x in steps), normal(3, 4, 32, 16, seed=9).detach()),
            {"qk_l2norm": True, "scale": 0.2},
        ),
        "causal_conv1d_step": (
            tuple(normal(*shape, seed=1).detach() for shape in ((3, 300), (3, 300, 3), (300, 4), (300,))),
            {"activation": "silu"},
        ),
    }


def adam_shards() -> AdamShards:
    shards = []
    for seed, size in enumerate((5000, 0, 1, 4097)):
        weight, grad, mean = (TARGET.normal(size, seed=10 * seed + n).detach().bfloat16() for n in range(3))
        rest = (torch.arange(size) % 3000 * 20 - 30000).to(torch.int16)
        shards.append(AdamShard(weight, grad, mean, mean.square(), rest, seed=seed, first=2**31 + seed))
    return AdamShards(shards)


def results(function: Callable[..., Any], tensors: Any, options: dict[str, Any]) -> list[torch.Tensor | None]:
    if isinstance(tensors[0], AdamShards):
        function(
            copy := AdamShards(shard._replace(**clones(shard)) for shard in tensors[0].shards), **options
        )
        return [state for shard in copy.shards for state in states(*shard[:5])]
    tensors = tuple(x.clone() if isinstance(x, torch.Tensor) and not x.requires_grad else x for x in tensors)
    result = function(*tensors, **options)
    if result is None:
        return states(*tensors)
    outputs = result if isinstance(result, tuple) else (result,)
    extra = [x for x in options.values() if isinstance(x, torch.Tensor)]
    wanted = [x for x in (*tensors, *extra) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not wanted:
        return list(outputs)
    smooth = [x for x in outputs if x is not None and x.requires_grad]
    return [*outputs, *grads_of(smooth, wanted)]


def clones(shard: AdamShard) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in shard._asdict().items() if isinstance(x, torch.Tensor)}


def states(
    weight: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, rest: torch.Tensor
) -> list[torch.Tensor]:
    """What AdamW changes, and the gradient; the weight's two halves are compared as one number."""
    return [join_float32(weight, rest), grad, mean, square]


def cases(dtype: torch.dtype, operators: Container[str] = TILED) -> list[Case]:
    """Return what is checked of sequences packed together, and of gates that close now and then."""
    chosen = [case for case in parity_cases() if "neighbours" in case.name and case.op in operators]
    chosen += closing_gate_cases(on_own_scale=True)
    return [case for case in chosen if case.name.endswith(dtype_name(dtype))]


def check_operators() -> None:
    # Small pieces, so that the small inputs here have several.
    conv.FORWARD, conv.BACKWARD = {"L": 16, "B": 16}, {"L": 16, "B": 16, "UNROLL": 4}
    logprob.STEP = logprob_fixed.STEP = 64
    logprob_slices.MIN_SLICE = 256
    logprob_slices.LOGITS_AT_ONCE = 13 * 256
    norms.TILE = 128
    experts.TILE = 16
    delta_gates.TILE = 64
    for name, (tensors, options) in calls().items():
        op = name.split()[0]
        expected = results(torch_backend.IMPLEMENTATIONS[op], tensors, options)
        # To find out where something lies, the host waits for the device.
        blind = options.get("all_targets", False)
        with patch.object(torch, "nonzero", None) if blind else nullcontext():
            actual = results(TritonBackend().implementation(op), tensors, options)
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            if e is not None:
                assert_near(a, e, 1e-5, f"{name} result {index}")
        print(name, "agrees", flush=True)


def check_rank(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    accept_arrays_of_one()
    logprob.STEP = logprob_fixed.STEP = 64
    logprob_slices.MIN_SLICE, logprob_slices.LOGITS_AT_ONCE = 256, 13 * 256
    V = 600
    hidden, weight, target_T = (
        TARGET.normal(13, 16, seed=1),
        TARGET.normal(2 * V, 16, seed=2),
        torch.arange(13),
    )
    target_T = target_T * 90 - 1
    triton, reference = TritonBackend().implementation("linear_logprob"), torch_backend.IMPLEMENTATIONS
    for fixed, top_k in ((False, 900), (False, 3), (True, None)):
        part = weight.detach()[V * rank : V * rank + V].clone().requires_grad_(not fixed)
        options = {"temperature": 0.7, "with_entropy": not fixed, "top_k": top_k, "chunk_tokens": None}
        alone = {**options, "all_targets": False, "process_group": None, "reduce_hidden_grad": True}
        whole = weight.detach().requires_grad_(not fixed)
        expected = results(reference["linear_logprob"], (hidden, whole, target_T), alone)
        actual = results(triton, (hidden, part, target_T), {**alone, "process_group": dist.group.WORLD})
        if not fixed:
            expected[-1] = expected[-1][V * rank : V * rank + V]
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            if e is not None:
                assert_near(a, e, 1e-5, f"result {index} of rank {rank}, top {top_k}, fixed {fixed}")
        if rank == 0:
            print("fixed" if fixed else f"top {top_k}", "agrees", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(what: str) -> None:
    accept_arrays_of_one()
    if what == "operators":
        check_operators()
    elif what == "ranks":
        with TemporaryDirectory() as folder:
            mp.start_processes(check_rank, (folder,), nprocs=2, start_method="fork")
    else:
        check_cases(case for case in cases(torch.float32) if "-128-" not in case.name)


if __name__ == "__main__":
    main(sys.argv[1])
