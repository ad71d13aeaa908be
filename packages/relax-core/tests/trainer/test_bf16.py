"""bfloat16 training against the same training in float32.

Both start from the same weights, rounded to bfloat16 where the bf16 model keeps them so.
"""

import pytest
import torch
from relax_core.algorithms import AlgorithmConfig
from relax_core.loop.objectives import SftObjective
from relax_core.trainer.checkpoint import load_checkpoint, save_checkpoint
from relax_kernels import split_float32

OBJECTIVE = SftObjective(AlgorithmConfig(name="sft"))
FLOAT32 = ("A_log", "dt_bias", "out_norm.weight")


def weights(trainer):
    return {name: parameter.detach().float().clone() for name, parameter in trainer.model.named_parameters()}


def main_weights(trainer):
    """The optimizer's float32 weights by name."""
    (optimizer,) = trainer.training.optimizer.chained_optimizers
    return {
        name: optimizer._get_main_param_and_optimizer_states(parameter)["param"].view_as(parameter).clone()
        for name, parameter in trainer.model.named_parameters()
    }


@pytest.fixture
def pair(make_trainer):
    """(bf16, fp32) trainers of the same settings and weights."""

    def make(gradient_precision="fp32", moment_precision="fp32", **settings):
        formats = {"gradient_precision": gradient_precision, "moment_precision": moment_precision}
        low, high = make_trainer(precision="bf16", **formats, **settings), make_trainer(**settings)
        with torch.no_grad():
            for (name, p), q in zip(low.model.named_parameters(), high.model.parameters(), strict=True):
                assert p.dtype is (torch.float32 if name.endswith(FLOAT32) else torch.bfloat16)
                q.copy_(p)
        return low, high

    return make


def test_ten_steps_follow_float32(pair, samples):
    low, high = pair(lr=3e-3, eps=1e-4, micro_batch_tokens=20)
    start, losses = weights(high), []
    for _ in range(10):
        a, b = low.step(samples, OBJECTIVE).values, high.step(samples, OBJECTIVE).values
        # bfloat16 keeps 8 bits: single activations are off by up to 0.4 %, and the errors average out.
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)
        losses.append(b["loss"])
    assert losses[-1] < 0.9 * losses[0]
    exact, rounded, main = weights(high), weights(low), main_weights(low)
    for name, parameter in low.model.named_parameters():
        moved = (exact[name] - start[name]).norm()
        assert moved > 0, name
        assert (main[name] - exact[name]).norm() < 0.05 * moved, name
        nearest = split_float32(main[name])[0] if parameter.dtype is torch.bfloat16 else main[name]
        assert torch.equal(nearest.float(), rounded[name]), name


def test_steps_below_the_resolution_of_bfloat16_add_up(pair, samples):
    low, high = pair(lr=2e-7, eps=1e-4)
    before, start = weights(low), main_weights(low)
    for _ in range(20):
        low.step(samples, OBJECTIVE)
        high.step(samples, OBJECTIVE)
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    unmoved = (weights(low)[name] == before[name]).float().mean()
    assert unmoved > 0.9
    moved, wanted = main_weights(low)[name] - start[name], weights(high)[name] - before[name]
    assert (moved - wanted).norm() < 0.05 * wanted.norm()


def test_going_on_from_a_checkpoint_keeps_the_float32_weights(make_trainer, samples, tmp_path):
    through = make_trainer(precision="bf16", lr=1e-4)
    for _ in range(2):
        through.step(samples, OBJECTIVE)
    save_checkpoint(tmp_path, 2, through, {}, keep=1)
    expected = [through.step(samples, OBJECTIVE).values for _ in range(3)]
    resumed = make_trainer(precision="bf16", lr=1e-4)
    load_checkpoint(tmp_path / "step_2", resumed)
    assert [resumed.step(samples, OBJECTIVE).values for _ in range(3)] == expected
    first, second = main_weights(through), main_weights(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in first.values())


def test_gradients_and_means_in_bfloat16_train_nearly_alike(pair, samples):
    small, high = pair(lr=3e-3, eps=1e-4, gradient_precision="bf16", moment_precision="bf16")
    start = weights(high)
    for _ in range(5):
        a, b = small.step(samples, OBJECTIVE).values, high.step(samples, OBJECTIVE).values
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
    exact, main = weights(high), main_weights(small)
    for name in exact:
        # An update is off by what three bfloat16 numbers of 8 bits are off.
        assert (main[name] - exact[name]).norm() < 0.1 * (exact[name] - start[name]).norm(), name
    kept = sum(s.nbytes for state in small.training.adams[0].state.values() for s in state.values())
    numbers = sum(p.numel() for p in small.model.parameters() if p.dtype is torch.bfloat16)
    # Two means and the lower half of the weight; the few float32 weights are counted loosely.
    assert 6 * numbers <= kept < 6.5 * numbers
