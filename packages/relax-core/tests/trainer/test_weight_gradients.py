"""Gradients of linear weights go straight into their sum, and are those that autograd gives."""

import pytest
import torch
from relax_core.algorithms import AlgorithmConfig
from relax_core.loop.objectives import SftObjective
from relax_core.trainer.weight_gradients import WeightGradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_product_is_added_to_what_is_there(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.5, -1.0]], dtype=dtype)
    grad = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0], [2.0, 2.0, -2.0]], dtype=dtype)
    total = torch.full((3, 2), 10.0)
    WeightGradients.wgrad_gemm_accum_fp32(x, grad, total)
    # By hand: row f is 10 + sum over tokens of grad[t, f] * x[t].
    assert total.tolist() == [[12.0, 10.0], [14.0, 12.0], [11.0, 16.0]]


def test_a_sum_of_half_precision_is_added_to() -> None:
    x, grad = torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16)
    total = torch.ones(3, 2, dtype=torch.bfloat16)
    WeightGradients.wgrad_gemm_accum_fp16(x, grad, total)
    assert total.tolist() == [[5.0, 5.0]] * 3


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_trainer_sums_what_autograd_gives(make_trainer, samples, monkeypatch, recompute):
    """Several micro-batches, against a second trainer whose gradients pass through a tensor."""
    fused, plain = (make_trainer(micro_batch_tokens=20, recompute=recompute) for _ in range(2))
    calls = []
    product = WeightGradients.wgrad_gemm_accum_fp32
    monkeypatch.setattr(
        WeightGradients,
        "wgrad_gemm_accum_fp32",
        staticmethod(lambda *tensors: (calls.append(len(tensors[0])), product(*tensors))[1]),
    )
    linears = [m for m in plain.model.modules() if getattr(m, "gradient_accumulation_fusion", False)]
    assert len(linears) >= 4 * plain.model.model_config.num_layers
    for linear in linears:
        linear.gradient_accumulation_fusion = False
    objective = SftObjective(AlgorithmConfig(name="sft"))
    plain.step(samples, objective)
    assert not calls
    fused.step(samples, objective)
    # In each of three micro-batches all but the head, whose products are those of the log-probs.
    assert len(calls) == 3 * (len(linears) - 1)
    for (name, a), (_, b) in zip(fused.model.named_parameters(), plain.model.named_parameters(), strict=True):
        torch.testing.assert_close(a.main_grad, b.main_grad, rtol=1e-5, atol=1e-7, msg=name)
