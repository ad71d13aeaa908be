"""Gradients and moments in bfloat16, 10 bytes per parameter, against both in float32, 16."""

import pytest
import torch
from relax_core.algorithms import AlgorithmConfig
from relax_core.loop.objectives import SftObjective
from relax_core.trainer.checkpoint import load_checkpoint, save_checkpoint
from relax_core.trainer.optimizer import NonFiniteGradientError

OBJECTIVE = SftObjective(AlgorithmConfig(name="sft"))
SETTINGS = {"precision": "bf16", "lr": 3e-3, "eps": 1e-4}
FORMATS = ("fp32", "bf16")


@pytest.fixture
def make(make_trainer):
    """Makes trainers that differ in the format of gradients and moments alone."""

    def of(states, **more):
        return make_trainer(gradient_precision=states, moment_precision=states, **{**SETTINGS, **more})

    return of


def states(trainer):
    """float32 weight and moments by name."""
    (optimizer,) = trainer.training.optimizer.chained_optimizers
    return {
        f"{key} of {name}": tensor.detach().float().clone()
        for name, parameter in trainer.model.named_parameters()
        for key, tensor in optimizer._get_main_param_and_optimizer_states(parameter).items()
        if key != "step"
    }


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def differing(first, second):
    return [name for name in first if not torch.equal(first[name], second[name])]


def test_fifty_steps_follow_float32(make, make_trainer, samples):
    """10 bytes beside 16, and both beside a model that is float32 altogether."""
    full, half = (make(states_in, steps=50, micro_batch_tokens=20) for states_in in FORMATS)
    exact = make_trainer(steps=50, micro_batch_tokens=20, **{**SETTINGS, "precision": "fp32"})
    for mine, other in zip(exact.model.parameters(), full.model.parameters(), strict=True):
        mine.data.copy_(other)
    start, losses = states(full), []
    assert not differing(start, states(half))
    for step in range(50):
        a, b, _ = (trainer.step(samples, OBJECTIVE).values for trainer in (full, half, exact))
        assert b["loss"] == pytest.approx(a["loss"], rel=4e-3)
        if step < 10:
            # While the weights are nearly the same: sums of bfloat16 numbers of 8 bits.
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=4e-3)
        losses.append(a["loss"])
    assert losses[-1] < 0.2 * losses[0]
    one, two, three = states(full), states(half), states(exact)
    square = {"full": 0.0, "half": 0.0}
    for name in [f"param of {name}" for name in weights(full)]:
        moved, apart = (one[name] - start[name]).norm(), (two[name] - one[name]).norm()
        # Or by less than one step of every element: some hardly move at all.
        assert apart < max(0.15 * moved, 3e-3 * one[name].numel() ** 0.5), name
        square["full"] += (one[name] - three[name]).square().sum()
        square["half"] += (two[name] - three[name]).square().sum()
    # What bfloat16 activations do to the weights is all: states of 10 bytes add nothing to it.
    assert square["half"] < 1.2**2 * square["full"]


def test_steps_below_the_resolution_of_bfloat16_add_up(make, samples):
    full, half = (make(states_in, lr=2e-7, steps=20) for states_in in FORMATS)
    start, seen = states(full), weights(half)
    for _ in range(20):
        full.step(samples, OBJECTIVE)
        half.step(samples, OBJECTIVE)
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    assert (weights(half)[name] == seen[name]).float().mean() > 0.9
    moved, wanted = (states(x)[f"param of {name}"] - start[f"param of {name}"] for x in (half, full))
    assert (moved - wanted).norm() < 0.05 * wanted.norm()


def test_weights_are_the_nearest_to_float32(make, samples):
    trainer = make("bf16")
    trainer.step(samples, OBJECTIVE)
    held = states(trainer)
    for name, weight in weights(trainer).items():
        exact = held[f"param of {name}"].view_as(weight)
        # The nearest to the even one differs in exact half-way cases alone.
        assert ((weight - exact.to(weight.dtype)) == 0).float().mean() > 0.999, name
        assert weight.dtype is torch.float32 or not torch.equal(exact, weight.float()), name


def test_memory_is_ten_bytes_per_parameter(make, samples):
    trainer = make("bf16")
    trainer.step(samples, OBJECTIVE)
    (optimizer,) = trainer.training.optimizer.chained_optimizers
    low = [p for p in trainer.model.parameters() if p.dtype is torch.bfloat16]
    for p in low:
        group, order = optimizer.model_param_group_index_map[p]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        assert sum(x.nbytes for x in (p, p.main_grad, *state.values())) == 10 * p.numel()
    assert len(low) > 40
    assert all(p.main_param is None for p in low)


def test_the_norm_is_that_of_float32_and_clips_as_it_does(make, samples):
    """One micro-batch, whose gradients are bfloat16 in both."""
    for limit in (0.0, 1e-3):
        full, half = (make(states_in, mtp_layers=0, clip_grad=limit, lr=1e-2) for states_in in FORMATS)
        before = states(full)
        a, b = (trainer.step(samples, OBJECTIVE).values for trainer in (full, half))
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)
        assert a["grad_norm"] > 1e-3
        for name, exact in states(full).items():
            if name.startswith("param"):
                # float32 weights of up to 2, in whose move of up to 0.01 the last bit counts.
                assert torch.allclose(states(half)[name], exact, rtol=0, atol=3e-7), name
        assert differing(before, states(full))


def test_a_gradient_of_nan_is_refused_and_nothing_moves(make, samples):
    trainer = make("bf16")
    trainer.step(samples, OBJECTIVE)
    before, seen = states(trainer), weights(trainer)
    trainer.training.begin()
    for parameter in trainer.model.parameters():
        parameter.main_grad.zero_()
    next(trainer.model.parameters()).main_grad.view(-1)[3] = torch.nan
    norm = trainer.training.grad_norm()
    trainer.training.step(norm)
    with pytest.raises(NonFiniteGradientError, match="gradient norm is nan"):
        trainer.training.refuse_non_finite(float(norm))
    assert not differing(before, states(trainer))
    assert not differing(seen, weights(trainer))


def test_going_on_from_a_checkpoint_equals_never_having_stopped(make, samples, tmp_path):
    through = make("bf16", schedule="cosine", warmup_steps=2)
    for _ in range(3):
        through.step(samples, OBJECTIVE)
    save_checkpoint(tmp_path, 3, through, {}, keep=1)
    expected = [through.step(samples, OBJECTIVE).values for _ in range(3)]
    resumed = make("bf16", schedule="cosine", warmup_steps=2)
    load_checkpoint(tmp_path / "step_3", resumed)
    assert [resumed.step(samples, OBJECTIVE).values for _ in range(3)] == expected
    assert not differing(states(through), states(resumed))
    assert not differing(weights(through), weights(resumed))


@pytest.mark.parametrize(("saved", "loaded"), [FORMATS, FORMATS[::-1]])
def test_a_checkpoint_of_the_other_format_goes_on(make, samples, tmp_path, saved, loaded):
    first = make(saved)
    for _ in range(3):
        first.step(samples, OBJECTIVE)
    save_checkpoint(tmp_path, 3, first, {}, keep=1)
    second = make(loaded)
    load_checkpoint(tmp_path / "step_3", second)
    was, now = states(first), states(second)
    for name, exact in was.items():
        # Weights are exact in both; moments lose what bfloat16 does not hold, rounded to the nearest.
        rounded = saved == "fp32" and not name.startswith("param")
        assert torch.allclose(now[name], exact, rtol=2.0**-8 if rounded else 0, atol=0), name
    for _ in range(3):
        a, b = (trainer.step(samples, OBJECTIVE).values for trainer in (first, second))
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-3)
        assert b["lr"] == a["lr"]
    steps = [max(g["step"] for g in x.training.optimizer.state_dict()["optimizer"]["param_groups"])
             for x in (first, second)]  # fmt: skip
    assert steps == [6, 6]
