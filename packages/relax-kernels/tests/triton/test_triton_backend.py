"""Which calls the triton backend serves and why it leaves others; it loads only where triton is, and late."""

import subprocess
import sys
from typing import Any

import pytest
import relax_kernels as rk
import torch
from relax_kernels.errors import BackendUnavailable
from relax_kernels.triton_backend import backend as triton_backend

CU = rk.CuSeqlens.from_lengths((3, 5))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def delta_rule(K: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[tuple[Any, ...], dict[str, Any]]:
    heads = meta(8, 2, K, dtype=dtype), meta(8, 2, K, dtype=dtype), meta(8, 4, K, dtype=dtype)
    return (*heads, meta(8, 4), meta(8, 4)), {"cu_seqlens": CU}


def conv(W: int = 4, dtype: torch.dtype = torch.bfloat16) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (meta(8, 32, dtype=dtype), meta(32, W)), {"cu_seqlens": CU}


def attention(D: int = 256, E: int = 256, dtype: torch.dtype = torch.bfloat16) -> Any:
    heads = meta(8, 4, D, dtype=dtype), meta(8, 2, D, dtype=dtype), meta(8, 2, E, dtype=dtype)
    return heads, {"cu_seqlens_q": CU}


def logprob(dtype: torch.dtype = torch.bfloat16) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (meta(8, 64, dtype=dtype), meta(1000, 64, dtype=dtype), meta(8, dtype=torch.int64)), {}


@pytest.fixture(autouse=True)
def only_with_triton() -> None:
    pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("gated_delta_rule", delta_rule()),
        ("gated_delta_rule", delta_rule(K=32)),
        ("causal_conv1d", conv()),
        ("causal_conv1d", conv(W=2, dtype=torch.float32)),
        ("attention", attention()),
        ("linear_logprob", logprob()),
        ("linear_logprob", (logprob()[0], {"top_k": 20})),
        ("rms_norm", ((meta(8, 100), meta(100)), {"eps": 1e-6, "zero_centred": True})),
    ],
)
def test_serves_cuda(op: str, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    arguments, options = call
    explanation = rk.explain(op, *arguments, device_type="cuda", **options)
    assert explanation.chosen == "triton"
    assert explanation.detail


@pytest.mark.parametrize(
    ("op", "call", "reason"),
    [
        ("gated_delta_rule", delta_rule(dtype=torch.float32), "for bfloat16 only"),
        ("gated_delta_rule", delta_rule(K=256), "given K = 256"),
        ("causal_conv1d", conv(W=5), "2 to 4 taps"),
        ("causal_conv1d", conv(dtype=torch.float64), "float64 is the reference's"),
        ("attention", attention(dtype=torch.float32), "bfloat16 and float16"),
        ("attention", attention(D=260, E=260), "multiples of 8"),
        ("attention", attention(E=128), "values of the keys' head dim"),
        ("linear_logprob", logprob(dtype=torch.float32), "bfloat16 and float16"),
    ],
)
def test_says_why_not(op: str, call: tuple[tuple[Any, ...], dict[str, Any]], reason: str) -> None:
    arguments, options = call
    explanation = rk.explain(op, *arguments, device_type="cuda", **options)
    assert explanation.chosen == "torch"
    assert reason in dict(explanation.others)["triton"]


def test_leaves_the_cpu_alone() -> None:
    arguments, options = delta_rule()
    explanation = rk.explain("gated_delta_rule", *arguments, device_type="cpu", **options)
    assert explanation.chosen == "torch"
    assert dict(explanation.others)["triton"] == "runs on cuda, not on cpu"


def test_is_unavailable_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="triton is not installed"):
        triton_backend.create()


def test_triton_is_imported_with_the_first_kernel_only() -> None:
    name = "relax_kernels.triton_backend.jit"
    program = f"import sys, relax_kernels; relax_kernels.backends(); print({name!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
