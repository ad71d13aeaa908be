"""Every triton kernel compiles for Hopper, where there is no CUDA device: the interpreter takes more than the
compiler does.
"""

from __future__ import annotations

from collections.abc import Callable
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
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches compile only; the names of the kernels."""
    names: list[str] = []
    run = triton.runtime.jit.JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", warm_up)
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperWithoutDevice())
    return names


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.rand(*shape).to(dtype).requires_grad_()


CALLS: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any], set[str]]] = {
    "adamw_step": (
        lambda: (*(leaf(T).detach() for _ in range(4)), torch.zeros(T, dtype=torch.int16)),
        {"step": 3, "grad_scale": 0.5, "seed": 2**32 - 5, "first": 77, **OPTIONS},
        {"adamw_kernel"},
    ),
    "adamw_step in float32": (
        lambda: (*(leaf(T, dtype=torch.float32).detach() for _ in range(4)), None),
        {"step": 1, "grad_scale": 1.0, "seed": 0, "first": 0, **OPTIONS},
        {"adamw_kernel"},
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
def test_both_passes_compile(op: str, compiled: list[str]) -> None:
    inputs, options, kernels = CALLS[op]
    tensors = inputs()
    result = TritonBackend().implementation(op.split()[0])(*tensors, **options)
    outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    wanted = [x for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]
    if wanted:
        smooth = [x for x in outputs if x.requires_grad]
        torch.autograd.grad(smooth, wanted, [torch.ones_like(x) for x in smooth])
    assert set(compiled) == kernels
