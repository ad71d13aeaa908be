"""The simulated operators refuse what the real ones refuse: each layout and dtype rule by name."""

import pytest
import torch
from relax_npu.simulation import RefusedCallError

T, H, K, V, C, N = 70, 2, 128, 128, 32, 2
STARTS, INDICES = [0, 64, 70], [0, 0, 1, 0]
HALF = torch.bfloat16


def made(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


def wy(k=None, v=None, beta=None, A=None, g=None, starts=STARTS, indices=INDICES, chunk=64):
    exact = torch.float32
    return torch.ops.npu.npu_recompute_w_u_fwd(
        made(1, H, T, K) if k is None else k,
        made(1, H, T, V) if v is None else v,
        made(1, H, T, dtype=exact) if beta is None else beta,
        made(1, H, T, chunk) if A is None else A,
        chunk,
        g=made(1, H, T, dtype=exact) if g is None else g,
        cu_seqlens=starts,
        chunk_indices=indices,
    )


def test_the_right_call_is_served() -> None:
    w, u = wy()
    assert w.shape == (1, H, T, K)
    assert u.device.type == "npu"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"k": lambda: made(1, T, H, K)}, r"v must be \(1, 70, 2, 128\)"),
        ({"v": lambda: made(1, T, H, V)}, r"v must be \(1, 2, 70, 128\)"),
        ({"g": lambda: made(1, T, H, dtype=torch.float32)}, r"g must be \(1, 2, 70\)"),
        ({"beta": lambda: made(1, H, T)}, "beta must be one of"),
        ({"k": lambda: made(1, H, T, K, dtype=torch.float32)}, "k must be one of"),
        ({"k": lambda: made(1, H, T, 64), "v": lambda: made(1, H, T, 64)}, "K must be 128, given 64"),
        ({"v": lambda: made(1, 2 * H, T, V)}, r"v must be \(1, 2, 70, 128\)"),
        ({"k": lambda: made(1, T, H, K).transpose(1, 2)}, "k must be contiguous"),
        ({"starts": [0, 70], "indices": [0, 0]}, "chunk_indices must list"),
        ({"starts": [0, 64, 64, 70]}, "no empty sequence"),
        ({"starts": [0, 64]}, "must run from 0 to 70"),
        ({"starts": None}, "both lists"),
    ],
)
def test_the_delta_rule_is_called_in_its_layout(wrong: dict, told: str) -> None:
    given = {name: value() if callable(value) else value for name, value in wrong.items()}
    with pytest.raises(RefusedCallError, match=told):
        wy(**given)


def conv(weight=None, states=None, starts=(0, 64, 70), x=None):
    return torch.ops.npu.npu_causal_conv1d(
        made(T, C) if x is None else x,
        made(4, C) if weight is None else weight,
        None,
        made(N, 3, C) if states is None else states,
        query_start_loc=list(starts),
    )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"weight": (C, 4)}, "2 to 4 taps"),
        ({"states": (N, C, 3)}, r"conv_states must be \(2, 3, 32\)"),
        ({"states": (N, 4, C)}, r"conv_states must be \(2, 3, 32\)"),
        ({"x": (1, T, C)}, r"must be \[T, channels\]"),
    ],
)
def test_the_convolution_is_called_in_its_layout(wrong: dict, told: str) -> None:
    conv()
    with pytest.raises(RefusedCallError, match=told):
        conv(**{name: made(*shape) for name, shape in wrong.items()})


def attend(**changed):
    query = made(T, H, 64)
    arguments = {"scale": 1.0, "actual_seq_qlen": [64, 70], "actual_seq_kvlen": [64, 70]} | changed
    return torch.ops.npu.npu_fusion_attention(query, query, query, H, "TND", **arguments)


def test_lengths_may_end_with_zero_where_padding_follows() -> None:
    out, *_ = attend(actual_seq_qlen=[64, 0], actual_seq_kvlen=[64, 0])
    assert out[:64].isfinite().all()
    with pytest.raises(RefusedCallError, match="end at 64 of 70"):
        attend(actual_seq_qlen=[64], actual_seq_kvlen=[64])


def test_a_causal_call_needs_the_compressed_mask() -> None:
    with pytest.raises(RefusedCallError, match="needs the compressed mask"):
        attend(sparse_mode=3)
    with pytest.raises(RefusedCallError, match="True where a key is hidden"):
        attend(sparse_mode=3, atten_mask=torch.ones(2048, 2048, dtype=torch.bool, device="npu").tril())


def test_torch_itself_refuses_what_the_schema_does_not_have() -> None:
    with pytest.raises(RuntimeError, match="pre_tokens"):
        attend(pre_tokens=5)
    with pytest.raises(RuntimeError, match="actual_seq_qlen"):
        attend(actual_seq_qlen=torch.tensor([64, 70], device="npu"))


def test_an_operator_without_a_gradient_is_not_called_where_one_is_wanted() -> None:
    x = made(4, 32).requires_grad_()
    with pytest.raises(RefusedCallError, match=r"only an autograd\.Function may call it"):
        torch.ops.npu.npu_swiglu(x)
