"""Every triton kernel compiles for Hopper, where there is no CUDA device: the interpreter takes more than the
compiler does.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_kernels import CuSeqlens, sort_by_expert
from relax_kernels.testing.adam_cases import OPTIONS
from relax_kernels.triton_backend.backend import TritonBackend

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on this machine's device instead"
)

LENGTHS = CuSeqlens.from_lengths((65, 0, 3))
T = LENGTHS.total
EXPERTS = sort_by_expert(torch.randint(0, 5, (T, 2)), experts=5)


class HopperWithoutDevice:
    """Answers what Triton asks its driver before it compiles."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Launches compile only; the names of the kernels, and what they were compiled to."""
    kernels: list[tuple[str, Any]] = []
    run = triton.runtime.jit.JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernels.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", warm_up)
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperWithoutDevice())
    return kernels


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.rand(*shape).to(dtype).requires_grad_()


HEAD = {
    "temperature": 0.7, "all_targets": False, "chunk_tokens": None, "process_group": None,
    "reduce_hidden_grad": True,
}  # fmt: skip
CALLS: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any], set[str]]] = {
    "adamw_step": (
        lambda: (*(leaf(T).detach() for _ in range(4)), torch.zeros(T, dtype=torch.int16)),
        {"step": 3, "grad_scale": 0.5, "seed": 2**32 - 5, "first": 77, **OPTIONS},
        {"adamw_kernel"},
    ),
    "adamw_step with its scale on the device": (
        lambda: (*(leaf(T).detach() for _ in range(4)), torch.zeros(T, dtype=torch.int16)),
        {"step": 3, "grad_scale": torch.tensor(0.5), "seed": 1, "first": 77, **OPTIONS},
        {"adamw_kernel"},
    ),
    "adamw_step in float32": (
        lambda: (*(leaf(T, dtype=torch.float32).detach() for _ in range(4)), None),
        {"step": 1, "grad_scale": 1.0, "seed": 0, "first": 0, **OPTIONS},
        {"adamw_kernel"},
    ),
    "linear_logprob": (
        lambda: (leaf(T, 64), leaf(3000, 64), torch.arange(T) - 1),
        {**HEAD, "with_entropy": True, "top_k": 20},
        {"gather_kernel", "spread_kernel"},
    ),
    "linear_logprob of a fixed head": (
        lambda: (leaf(T, 64), leaf(3000, 64).detach(), torch.arange(T) - 1),
        {**HEAD, "with_entropy": False, "top_k": None},
        {"gather_kernel", "weigh_kernel"},
    ),
    "causal_conv1d": (
        lambda: (leaf(T, 512), leaf(512, 4), leaf(512)),
        {"cu_seqlens": LENGTHS, "activation": "silu", "initial_state_NCW": None, "output_final_state": False},
        {"conv_kernel", "conv_backward_kernel"},
    ),
    "rms_norm": (
        lambda: (leaf(T, 300), leaf(300)),
        {"eps": 1e-6, "zero_centred": True},
        {"norm_kernel", "norm_backward_kernel"},
    ),
    "gated_rms_norm": (
        lambda: (leaf(T, 300), leaf(T, 300), leaf(300)),
        {"eps": 1e-6},
        {"norm_kernel", "norm_backward_kernel"},
    ),
    "add_rms_norm": (
        lambda: (leaf(T, 300), leaf(T, 300), leaf(300)),
        {"eps": 1e-6, "zero_centred": True},
        {"norm_kernel", "norm_backward_kernel"},
    ),
    "rotary": (
        lambda: (leaf(T, 2, 64), torch.rand(T, 16), torch.rand(T, 16)),
        {},
        {"rotary_kernel"},
    ),
    "swiglu": (lambda: (leaf(T, 600),), {}, {"gate_kernel"}),
    "output_gate": (lambda: (leaf(T, 2, 64), leaf(T, 2, 64)), {}, {"gate_kernel"}),
    "delta_gates": (
        lambda: (leaf(T, 12), leaf(T, 12), leaf(12), leaf(12)),
        {},
        {"delta_gates_kernel", "delta_gates_backward_kernel"},
    ),
    "router_topk": (
        lambda: (leaf(T, 60, dtype=torch.float32),),
        {"top_k": 3, "normalise": True},
        {"choose_kernel", "choose_backward_kernel"},
    ),
    "permute_tokens": (lambda: (leaf(T, 300), EXPERTS), {}, {"spread_kernel", "combine_kernel"}),
    "unpermute_tokens": (
        lambda: (leaf(2 * T, 300), EXPERTS, leaf(T, 2)),
        {},
        {"combine_kernel", "combine_backward_kernel"},
    ),
    "gated_delta_rule_step": (
        lambda: tuple(
            leaf(*shape).detach()
            for shape in ((3, 2, 64), (3, 2, 64), (3, 4, 64), (3, 4), (3, 4), (3, 4, 64, 64))
        ),
        {"qk_l2norm": True, "scale": 0.2},
        {"delta_step_kernel"},
    ),
    "causal_conv1d_step": (
        lambda: tuple(leaf(*shape).detach() for shape in ((3, 300), (3, 300, 3), (300, 4), (300,))),
        {"activation": "silu"},
        {"conv_step_kernel"},
    ),
}


@pytest.mark.parametrize("op", CALLS)
def test_both_passes_compile(op: str, compiled: list[tuple[str, Any]]) -> None:
    inputs, options, kernels = CALLS[op]
    tensors = inputs()
    result = TritonBackend().implementation(op.split()[0])(*tensors, **options)
    outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    wanted = [x for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]
    if wanted:
        smooth = [x for x in outputs if x.requires_grad]
        torch.autograd.grad(smooth, wanted, [torch.ones_like(x) for x in smooth])
    assert {name for name, _ in compiled} == kernels


def stack_bytes(kernel: Any, folder: Path) -> int:
    """Return the bytes of local memory a thread needs: what does not fit in registers."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", told.stdout)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(("lengths", "K"), [((1024,), 128), ((64,) * 80, 128), ((1024,), 64)])
def test_the_delta_rule_for_hopper_compiles_and_stays_in_registers(
    lengths: tuple[int, ...],
    K: int,
    compiled: list[tuple[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    hopper = pytest.importorskip("relax_kernels.triton_backend.hopper_launch")
    monkeypatch.setattr(hopper, "serves", lambda problem: True)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    run_delta_rule(lengths, K)
    assert [name for name, _ in compiled] == [
        "prepare_kernel",
        "scan_kernel",
        "scan_kernel",
        "scan_backward_kernel",
        "gradients_kernel",
        "decay_kernel",
    ]
    # The gradients had 720 when they kept descriptors of their products in registers.
    assert max(stack_bytes(kernel, tmp_path) for _, kernel in compiled) <= 40
    # What one program may have of a multiprocessor's 228 KiB.
    assert max(kernel.metadata.shared for _, kernel in compiled) <= 227 * 1024


@pytest.mark.parametrize("K", [16, 128])
def test_the_delta_rule_for_any_device_compiles(K: int, compiled: list[tuple[str, Any]]) -> None:
    run_delta_rule((65, 0, 3), K)
    assert {name for name, _ in compiled} == {
        "prepare_kernel",
        "scan_kernel",
        "scan_backward_kernel",
        "gradients_kernel",
    }


def run_delta_rule(lengths: tuple[int, ...], K: int) -> None:
    cu = CuSeqlens.from_lengths(lengths)
    shapes = ((cu.total, 1, K), (cu.total, 1, K), (cu.total, 2, K), (cu.total, 2), (cu.total, 2))
    given = [leaf(*shape) for shape in shapes]
    o, _ = TritonBackend().implementation("gated_delta_rule")(
        *given,
        cu_seqlens=cu,
        initial_state_NUKV=None,
        output_final_state=False,
        qk_l2norm=True,
        scale=0.1,
    )
    torch.autograd.grad(o, given, torch.ones_like(o))
