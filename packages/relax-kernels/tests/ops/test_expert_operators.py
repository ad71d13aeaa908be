import pytest
import relax_kernels as rk
import torch
from relax_kernels.testing import NotServed, Target, assert_near, grads_of, tolerance


def run(target: Target, *args, **kwargs):
    try:
        return target.run(*args, **kwargs)
    except NotServed as reason:
        pytest.skip(str(reason))


def layer(target: Target, x, gate_weight, gate_up_EFD, down_EDF, top_k: int) -> torch.Tensor:
    """A block of experts from the five operators and swiglu."""
    routing = run(target, "router_topk", x @ gate_weight.T, top_k=top_k)
    permutation = run(target, "sort_by_expert", routing.expert_TK, experts=len(gate_up_EFD))
    rows = run(target, "permute_tokens", x, permutation)
    rows = run(target, "grouped_matmul", rows, gate_up_EFD, permutation.count_E)
    rows = run(target, "grouped_matmul", rk.swiglu(rows), down_EDF, permutation.count_E)
    return run(target, "unpermute_tokens", rows, permutation, routing.weight_TK)


def test_a_block_of_experts_equals_that_of_transformers(target: Target) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    config = pytest.importorskip("transformers").Qwen3_5MoeTextConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
    )
    config._experts_implementation = "eager"
    block = theirs.Qwen3_5MoeSparseMoeBlock(config).to(target.device)
    parameters = list(block.parameters())
    for seed, parameter in enumerate(parameters):
        parameter.data = target.normal(*parameter.shape, seed=seed).detach() / 8
    x = target.normal(33, 64, seed=99)
    expected = block(x[None])[0]
    experts = block.experts
    y = layer(target, x, block.gate.weight, experts.gate_up_proj, experts.down_proj, top_k=3)
    y = y + rk.output_gate(block.shared_expert(x), block.shared_expert_gate(x))
    allowed = tolerance(torch.float32, target.device)
    assert_near(y, expected, allowed)
    wanted = [x, *parameters]
    for mine, other in zip(grads_of((y,), wanted), grads_of((expected,), wanted), strict=True):
        assert_near(mine, other, 5 * allowed)


def test_router_by_hand(target: Target) -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 1.0]], device=target.device).log()
    weight, expert = run(target, "router_topk", logits, top_k=3)
    # Shares 1/8, 2/8, 4/8, 1/8: the lower of two equal experts is third.
    assert expert.tolist() == [[2, 1, 0]]
    assert_near(weight.cpu(), torch.tensor([[4 / 7, 2 / 7, 1 / 7]]), 1e-6)
    weight, _ = run(target, "router_topk", logits, top_k=3, normalise=False)
    assert_near(weight.cpu(), torch.tensor([[4 / 8, 2 / 8, 1 / 8]]), 1e-6)


def test_router_is_float32_for_bfloat16(target: Target) -> None:
    logits = target.normal(5, 8, seed=1, dtype=torch.bfloat16)
    assert run(target, "router_topk", logits, top_k=2).weight_TK.dtype == torch.float32


def test_permuting_back_with_weights_that_sum_to_one_is_the_identity(target: Target) -> None:
    x = target.normal(33, 64, seed=1)
    weight, expert = run(target, "router_topk", target.normal(33, 8, seed=2), top_k=4)
    permutation = run(target, "sort_by_expert", expert, experts=8)
    back = run(target, "unpermute_tokens", run(target, "permute_tokens", x, permutation), permutation, weight)
    assert_near(back, x, tolerance(torch.float32, target.device))


def test_runs_give_equal_bits(target: Target) -> None:
    x, gate = target.normal(33, 64, seed=1), target.normal(8, 64, seed=2)
    up, down = target.normal(8, 64, 64, seed=3), target.normal(8, 64, 32, seed=4)
    inputs = (x, gate, up, down)
    first, second = (layer(target, *inputs, top_k=3) for _ in range(2))
    assert torch.equal(first, second)
    for a, b in zip(grads_of((first,), inputs), grads_of((second,), inputs), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_the_reference_are_those_of_finite_differences() -> None:
    on, f64 = Target("torch", "cpu"), torch.float64
    logits, x = on.normal(5, 4, seed=1, dtype=f64), on.normal(5, 3, seed=2, dtype=f64)
    matrices = on.normal(4, 6, 3, seed=3, dtype=f64)

    def function(logits, x, matrices):
        weight, expert = rk.router_topk(logits, top_k=2, backend="torch")
        permutation = rk.sort_by_expert(expert, experts=4, backend="torch")
        rows = rk.permute_tokens(x, permutation, backend="torch")
        rows = rk.grouped_matmul(rows, matrices, permutation.count_E, backend="torch")
        return rk.unpermute_tokens(rows, permutation, weight, backend="torch")

    assert torch.autograd.gradcheck(function, (logits, x, matrices))


def test_bad_inputs_are_refused_by_name() -> None:
    logits, x = torch.zeros(3, 4), torch.zeros(3, 8)
    with pytest.raises(rk.InvalidInput, match="top_k must be a whole number from 1 to E = 4, given 5"):
        rk.router_topk(logits, top_k=5)
    with pytest.raises(rk.InvalidInput, match=r"expert_TK must lie in \[0, 4\), given values from 0 to 4"):
        rk.sort_by_expert(torch.tensor([[0, 4]]), experts=4)
    with pytest.raises(rk.InvalidInput, match="expert_TK must be one of int64"):
        rk.sort_by_expert(torch.zeros(3, 2, dtype=torch.int32), experts=4)
    permutation = rk.sort_by_expert(torch.zeros(3, 2, dtype=torch.int64), experts=4)
    with pytest.raises(rk.InvalidInput, match=r"permutation.row_TK has shape \(3, 2\)"):
        rk.permute_tokens(torch.zeros(2, 8), permutation)
    with pytest.raises(rk.InvalidInput, match="permutation must come from sort_by_expert, given Tensor"):
        rk.permute_tokens(x, permutation.row_TK)
    with pytest.raises(rk.InvalidInput, match=r"permutation.token_P has shape \(6,\)"):
        rk.unpermute_tokens(torch.zeros(5, 8), permutation, torch.zeros(3, 2))
    with pytest.raises(rk.InvalidInput, match="count_E must be numbers of rows with sum P = 3, given sum 6"):
        rk.grouped_matmul(x, torch.zeros(4, 5, 8), permutation.count_E)
