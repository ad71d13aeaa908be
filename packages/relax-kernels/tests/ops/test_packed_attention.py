import pytest
import relax_kernels as rk
import torch
import torch.nn.functional as F
from relax_kernels.testing import NotServed, Target, assert_near, grads_of, tolerance

CU = rk.CuSeqlens.from_lengths


def run(target: Target, *args, **kwargs):
    try:
        return target.run("attention", *args, **kwargs)
    except NotServed as reason:
        pytest.skip(str(reason))


def qkv(target: Target, T: int, S: int, H: int = 2, G: int = 1, D: int = 64) -> list[torch.Tensor]:
    return [target.normal(T, H, D, seed=1), target.normal(S, G, D, seed=2), target.normal(S, G, D, seed=3)]


def test_equals_attention_of_torch(target: Target) -> None:
    q, k, v = qkv(target, 130, 130, H=4, G=2)
    o = run(target, q, k, v, cu_seqlens_q=CU((130,)))
    q1, k1, v1 = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, enable_gqa=True)
    assert_near(o, expected[0].transpose(0, 1), tolerance(torch.float32, target.device))


def test_the_first_token_sees_only_itself(target: Target) -> None:
    q, k, v = qkv(target, 10, 10)
    o, lse = run(target, q, k, v, cu_seqlens_q=CU((4, 6)), return_lse=True)
    for first in (0, 4):
        assert_near(o[first, 1], v[first, 0], 1e-6)
        score = (q[first, 1] * k[first, 0]).sum() / 8
        assert_near(lse[first, 1], score, tolerance(torch.float32, target.device))


def test_a_query_that_sees_no_key_gives_zero_and_no_gradient(target: Target) -> None:
    q, k, v = qkv(target, 5, 2)
    o, lse = run(target, q, k, v, cu_seqlens_q=CU((5,)), cu_seqlens_k=CU((2,)), return_lse=True)
    # Queries 3 and 4 stand beside keys 0 and 1.
    assert torch.equal(o[:3], torch.zeros_like(o[:3]))
    assert (lse[:3] == -torch.inf).all()
    assert lse[3:].isfinite().all()
    dq, dk, dv = grads_of((o,), (q, k, v))
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    assert torch.equal(dq[:3], torch.zeros_like(dq[:3]))


def test_partial_results_merge_exactly_by_their_lse(target: Target) -> None:
    """What context parallelism does: the keys come in two parts, here the past and the present."""
    q, k, v = qkv(target, 70, 100)
    whole, lse = run(target, q, k, v, cu_seqlens_q=CU((70,)), cu_seqlens_k=CU((100,)), return_lse=True)
    past, past_lse = run(
        target,
        q,
        k[:30],
        v[:30],
        cu_seqlens_q=CU((70,)),
        cu_seqlens_k=CU((30,)),
        causal=False,
        return_lse=True,
    )
    present, present_lse = run(target, q, k[30:], v[30:], cu_seqlens_q=CU((70,)), return_lse=True)
    merged_lse = torch.logaddexp(past_lse, present_lse)
    merged = (past_lse - merged_lse).exp()[..., None] * past + (present_lse - merged_lse).exp()[
        ..., None
    ] * present
    allowed = tolerance(torch.float32, target.device)
    assert_near(merged, whole, allowed)
    assert_near(merged_lse, lse, allowed)
    for mine, other in zip(grads_of((merged,), (q, k, v)), grads_of((whole,), (q, k, v)), strict=True):
        assert_near(mine, other, allowed)


def test_parts_merge_to_float64_round_off_also_where_a_query_sees_nothing() -> None:
    """As in a ring: every rank's keys in turn, of which some come after the query."""
    on, f64 = Target("torch", "cpu"), torch.float64
    q, k, v = (on.normal(40, heads, 16, seed=seed, dtype=f64) for seed, heads in ((1, 2), (2, 1), (3, 1)))
    whole, lse = run(on, q, k, v, cu_seqlens_q=CU((40,)), return_lse=True)
    merged, merged_lse = torch.zeros_like(whole), torch.full_like(lse, -torch.inf)
    for first in (0, 10, 20, 30):
        # The first ten of the queries that stand beside these keys or behind them, and all later ones.
        parts = []
        for start, causal in ((first, True), (first + 10, False)):
            rows = slice(start, start + 10 if causal else 40)
            some = q[rows], k[first : first + 10], v[first : first + 10]
            cu = {"cu_seqlens_q": CU((len(some[0]),)), "cu_seqlens_k": CU((10,))}
            parts.append(run(on, *some, **cu, causal=causal, return_lse=True))
        o = torch.cat((torch.zeros_like(q[:first]), *(part[0] for part in parts)))
        o_lse = torch.cat((torch.full_like(lse[:first], -torch.inf), *(part[1] for part in parts)))
        total = torch.logaddexp(merged_lse, o_lse)
        merged = (merged_lse - total).exp()[..., None] * merged + (o_lse - total).exp()[..., None] * o
        merged_lse = total
    assert_near(merged, whole, 1e-14)
    assert_near(merged_lse, lse, 1e-14)


def test_packed_equals_separate(target: Target) -> None:
    cu = CU((1, 65, 0, 17, 3))
    x = qkv(target, cu.total, cu.total)
    o = run(target, *x, cu_seqlens_q=cu)
    parts = [
        run(target, *(y[start:end] for y in x), cu_seqlens_q=CU((end - start,)))
        for start, end in zip(cu.host, cu.host[1:], strict=False)
    ]
    allowed = tolerance(torch.float32, target.device)
    assert_near(o, torch.cat(parts), allowed)
    for mine, other in zip(grads_of((o,), x), grads_of((torch.cat(parts),), x), strict=True):
        assert_near(mine, other, allowed)


def test_runs_give_equal_bits(target: Target) -> None:
    cu = CU((70, 5, 33))
    x = qkv(target, cu.total, cu.total)
    first, second = (run(target, *x, cu_seqlens_q=cu) for _ in range(2))
    assert torch.equal(first, second)
    for a, b in zip(grads_of((first,), x), grads_of((second,), x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_the_reference_are_those_of_finite_differences(causal: bool) -> None:
    on, f64 = Target("torch", "cpu"), torch.float64
    queries, keys = CU((1, 3, 0, 5)), CU((1, 2, 4, 7))
    shapes = [(9, 4, 3), (14, 2, 3), (14, 2, 5)]

    def function(q, k, v):
        o, lse = rk.attention(
            q, k, v, cu_seqlens_q=queries, cu_seqlens_k=keys, causal=causal, return_lse=True, backend="torch"
        )
        return o, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(
        function, [on.normal(*s, seed=i, dtype=f64) for i, s in enumerate(shapes)]
    )


REFUSED = {
    "k_SGD has shape (10, 2, 5)": {"k_SGD": torch.zeros(10, 2, 5)},
    "H = 4 (q_THD) must be a positive multiple of G = 3 (k_SGD)": {
        "k_SGD": torch.zeros(10, 3, 8),
        "v_SGE": torch.zeros(10, 3, 8),
    },
    "cu_seqlens_q covers 11 tokens": {"cu_seqlens_q": CU((11,))},
    "cu_seqlens_q covers 10 tokens, but k_SGD has S = 12": {
        "k_SGD": torch.zeros(12, 2, 8),
        "v_SGE": torch.zeros(12, 2, 8),
    },
    "cu_seqlens_q has 2 sequences, cu_seqlens_k has 1": {"cu_seqlens_k": CU((10,))},
    "v_SGE is torch.float64": {"v_SGE": torch.zeros(10, 2, 8).double()},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_inputs_are_refused_by_name(message: str) -> None:
    good = {"q_THD": torch.zeros(10, 4, 8), "k_SGD": torch.zeros(10, 2, 8), "v_SGE": torch.zeros(10, 2, 8)}
    good |= {"cu_seqlens_q": CU((4, 6))}
    rk.attention(**good)
    with pytest.raises(rk.InvalidInput) as refusal:
        rk.attention(**good | REFUSED[message])
    assert message in str(refusal.value)
