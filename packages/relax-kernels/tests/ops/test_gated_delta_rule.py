import math

import pytest
import relax_kernels as rk
import torch
from relax_kernels.testing import Case, NotServed, Target, assert_near, grads_of, tolerance
from relax_kernels.testing.delta_rule_cases import closing_gate_cases
from relax_kernels.torch_backend.delta_step import naive_gated_delta_rule

CU = rk.CuSeqlens.from_lengths


def inputs(
    target: Target, T: int, H: int = 1, U: int = 2, K: int = 64, V: int = 64, low: float = -1.0
) -> list:
    return [
        target.normal(T, H, K, seed=1),
        target.normal(T, H, K, seed=2),
        target.normal(T, U, V, seed=3),
        target.uniform(T, U, low=low, high=0.0, seed=4),
        target.uniform(T, U, low=0.0, high=1.0, seed=5),
    ]


def run(target: Target, *args, **kwargs):
    try:
        return target.run("gated_delta_rule", *args, **kwargs)
    except NotServed as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_equals_both_functions_of_transformers(target: Target, length: int) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    x = inputs(target, length, H=2, U=4)
    initial = target.normal(1, 4, 64, 64, seed=6)
    o, state = run(target, *x, cu_seqlens=CU((length,)), initial_state_NUKV=initial, output_final_state=True)
    grads = grads_of((o, state), [*x, initial])
    allowed = tolerance(torch.float32, target.device)
    for function in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        q, k = (y[None].repeat_interleave(2, 2) for y in x[:2])
        v, g, beta = (y[None] for y in x[2:])
        settings = {"initial_state": initial, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        o_1TUV, their_state = function(q, k, v, g, beta, **settings)
        assert_near(o, o_1TUV[0], allowed)
        assert_near(state, their_state, allowed)
        for mine, other in zip(grads, grads_of((o_1TUV[0], their_state), [*x, initial]), strict=True):
            assert_near(mine, other, 10 * allowed)


def test_the_reference_by_hand() -> None:
    # Two tokens, one head, K = V = 1, so that every symbol is a number.
    q, k, v = (
        torch.tensor(values, dtype=torch.float64).view(2, 1, 1) for values in ([2, 3], [0.5, 1], [4, 8])
    )
    g, beta = (
        torch.tensor(values, dtype=torch.float64).view(2, 1) for values in ([0, math.log(0.5)], [1, 0.25])
    )
    o, state = naive_gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=CU((2,)), output_final_state=True, qk_l2norm=False, scale=1.0
    )
    # S1 = k1 b1 v1 = 2;  o1 = 2 * 2.   S2 = 1 + 1 * 0.25 * (8 - 1) = 2.75;  o2 = 3 * 2.75.
    assert o.flatten().tolist() == [4.0, 8.25]
    assert state is not None
    assert state.item() == 2.75


def test_packed_equals_separate(target: Target) -> None:
    lengths = (1, 65, 0, 17, 128, 3)
    cu = CU(lengths)
    x = inputs(target, cu.total)
    initial = target.normal(len(lengths), 2, 64, 64, seed=6)
    o, final = run(target, *x, cu_seqlens=cu, initial_state_NUKV=initial, output_final_state=True)
    grads = grads_of((o,), x)
    outs, finals = [], []
    for i, (start, end) in enumerate(zip(cu.host, cu.host[1:], strict=False)):
        part = [y[start:end] for y in x]
        one, state = run(
            target,
            *part,
            cu_seqlens=CU((end - start,)),
            initial_state_NUKV=initial[i : i + 1],
            output_final_state=True,
        )
        outs.append(one)
        finals.append(state)
    allowed = tolerance(torch.float32, target.device)
    assert_near(o, torch.cat(outs), allowed)
    assert_near(final, torch.cat(finals), allowed)
    for mine, other in zip(grads, grads_of((torch.cat(outs),), x), strict=True):
        assert_near(mine, other, allowed)


@pytest.mark.parametrize("case", list(closing_gate_cases(on_own_scale=True)), ids=lambda case: case.name)
def test_dg_of_closed_gates_keeps_its_digits(target: Target, case: Case) -> None:
    """An error there counts times g in the gradient of A_log; the suite's scale is that of the largest dg."""
    try:
        case.check(target)
    except NotServed as reason:
        pytest.skip(str(reason))


def test_two_halves_joined_by_the_state_are_the_whole(target: Target) -> None:
    x = inputs(target, 100)
    whole, end = run(target, *x, cu_seqlens=CU((100,)), output_final_state=True)
    first, state = run(target, *(y[:37] for y in x), cu_seqlens=CU((37,)), output_final_state=True)
    second, last = run(
        target, *(y[37:] for y in x), cu_seqlens=CU((63,)), initial_state_NUKV=state, output_final_state=True
    )
    allowed = tolerance(torch.float32, target.device)
    assert_near(torch.cat((first, second)), whole, allowed)
    assert_near(last, end, allowed)
    halves, wholes = grads_of((torch.cat((first, second)), last), x), grads_of((whole, end), x)
    for mine, other in zip(halves, wholes, strict=True):
        assert_near(mine, other, allowed)


def test_steps_are_the_whole(target: Target) -> None:
    x = [y.detach() for y in inputs(target, 20)]
    whole, end = run(target, *x, cu_seqlens=CU((10, 10)), output_final_state=True)
    state = torch.zeros(2, 2, 64, 64, device=target.device)
    outs = []
    for t in range(10):
        now = [torch.stack((y[t], y[10 + t])) for y in x]
        try:
            o, state = target.run("gated_delta_rule_step", *now, state)
        except NotServed as reason:
            pytest.skip(str(reason))
        outs.append(o)
    allowed = tolerance(torch.float32, target.device)
    assert_near(torch.stack(outs, 1).flatten(0, 1), whole, allowed)
    assert_near(state, end, allowed)


def test_runs_give_equal_bits(target: Target) -> None:
    cu = CU((70, 5, 170))
    x = inputs(target, cu.total)
    first, second = (run(target, *x, cu_seqlens=cu, output_final_state=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(grads_of(first, x), grads_of(second, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lengths", [(3, 0, 2), (9, 40)], ids=str)
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("l2norm", [True, False])
def test_gradients_of_the_reference_are_those_of_finite_differences(
    lengths: tuple[int, ...], initial: bool, l2norm: bool
) -> None:
    cu = CU(lengths)
    on = Target("torch", "cpu")
    T, f64 = cu.total, torch.float64
    x = [
        on.normal(T, 1, 2, seed=1, dtype=f64),
        on.normal(T, 1, 2, seed=2, dtype=f64),
        on.normal(T, 2, 3, seed=3, dtype=f64),
        on.uniform(T, 2, low=-1.0, high=0.0, seed=4, dtype=f64),
        on.uniform(T, 2, low=0.0, high=0.6, seed=5, dtype=f64),
    ]
    if initial:
        x.append(on.normal(len(lengths), 2, 2, 3, seed=6, dtype=f64))

    def function(*y: torch.Tensor):
        state = y[5] if initial else None
        o, final = rk.gated_delta_rule(
            *y[:5],
            cu_seqlens=cu,
            initial_state_NUKV=state,
            output_final_state=initial,
            qk_l2norm=l2norm,
            backend="torch",
        )
        return (o, final) if initial else o

    assert torch.autograd.gradcheck(function, x, fast_mode=T > 10)


def test_bfloat16_keeps_a_float32_state(target: Target) -> None:
    x = [y.detach().bfloat16() for y in inputs(target, 5)]
    o, state = run(target, *x, cu_seqlens=CU((5,)), output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32


def test_no_tokens(target: Target) -> None:
    x = inputs(target, 0)
    o, state = run(target, *x, cu_seqlens=CU((0, 0)), output_final_state=True)
    assert o.shape == (0, 2, 64)
    assert torch.equal(state, torch.zeros(2, 2, 64, 64, device=target.device))


REFUSED = {
    "k_THK has shape (9, 1, 64)": {"k_THK": torch.zeros(9, 1, 64)},
    "T = 10 in q_THK": {"g_TU": torch.zeros(9, 2)},
    "q_THK must have axes [T, H, K], given shape (10, 64)": {"q_THK": torch.zeros(10, 64)},
    "v_TUV is torch.bfloat16": {"v_TUV": torch.zeros(10, 2, 64, dtype=torch.bfloat16)},
    "beta_TU must be one of bfloat16, float16, float32, float64, given int64": {
        "beta_TU": torch.zeros(10, 2, dtype=torch.int64)
    },
    "g_TU is on meta, but q_THK is on cpu": {"g_TU": torch.zeros(10, 2, device="meta")},
    "U = 3 (v_TUV) must be a positive multiple of H = 2 (q_THK)": {
        "q_THK": torch.zeros(10, 2, 64),
        "k_THK": torch.zeros(10, 2, 64),
        "v_TUV": torch.zeros(10, 3, 64),
        "g_TU": torch.zeros(10, 3),
        "beta_TU": torch.zeros(10, 3),
    },
    "cu_seqlens covers 11 tokens, but q_THK has T = 10": {"cu_seqlens": CU((4, 7))},
    "cu_seqlens must be a CuSeqlens": {"cu_seqlens": torch.tensor([0, 10])},
    "N = 2 in cu_seqlens": {"initial_state_NUKV": torch.zeros(3, 2, 64, 64)},
    "v_TUV must be a tensor with axes [T, U, V], given list": {"v_TUV": [1.0]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_inputs_are_refused_by_name(message: str) -> None:
    names = ("q_THK", "k_THK", "v_TUV", "g_TU", "beta_TU")
    good = dict(zip(names, inputs(Target("torch", "cpu"), 10), strict=True)) | {"cu_seqlens": CU((4, 6))}
    rk.gated_delta_rule(**good)
    with pytest.raises(rk.InvalidInput) as refusal:
        rk.gated_delta_rule(**good | REFUSED[message])
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("gated_delta_rule: ")


STEP_REFUSED = {
    "k_NHK has shape (3, 1, 8)": {"k_NHK": torch.zeros(3, 1, 8)},
    "v_NUV is torch.bfloat16": {"v_NUV": torch.zeros(2, 2, 8, dtype=torch.bfloat16)},
    "beta_NU has shape (2, 3)": {"beta_NU": torch.zeros(2, 3)},
    "state_NUKV has shape (2, 2, 8, 9)": {"state_NUKV": torch.zeros(2, 2, 8, 9)},
    "g_NU is on meta": {"g_NU": torch.zeros(2, 2, device="meta")},
    "U = 3 (v_NUV) must be a positive multiple of H = 2 (q_NHK)": {
        "q_NHK": torch.zeros(2, 2, 8),
        "k_NHK": torch.zeros(2, 2, 8),
        "v_NUV": torch.zeros(2, 3, 8),
        "g_NU": torch.zeros(2, 3),
        "beta_NU": torch.zeros(2, 3),
        "state_NUKV": torch.zeros(2, 3, 8, 8),
    },
}


@pytest.mark.parametrize("message", STEP_REFUSED)
def test_bad_inputs_of_the_step_are_refused_by_name(message: str) -> None:
    good = {"q_NHK": torch.zeros(2, 1, 8), "k_NHK": torch.zeros(2, 1, 8), "v_NUV": torch.zeros(2, 2, 8)}
    good |= {"g_NU": torch.zeros(2, 2), "beta_NU": torch.zeros(2, 2), "state_NUKV": torch.zeros(2, 2, 8, 8)}
    rk.gated_delta_rule_step(**good)
    with pytest.raises(rk.InvalidInput) as refusal:
        rk.gated_delta_rule_step(**good | STEP_REFUSED[message])
    assert message in str(refusal.value)


def test_queries_and_keys_are_not_kept_once_for_each_value_head() -> None:
    """What the backward pass is given: q and k of two key heads, although eight value heads read them."""
    kept: list[torch.Size] = []
    x = inputs(Target("torch", "cpu"), 64, H=2, U=8, K=40, V=48)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape), t)[1], lambda t: t):
        rk.gated_delta_rule(*x, cu_seqlens=CU((64,)), backend="torch")
    of_keys = [shape for shape in kept if shape[-1] == 40]
    assert [shape.numel() for shape in of_keys] == [64 * 2 * 40] * 2
