import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from relax_core.algorithms import AlgorithmConfig
from relax_core.loop.objectives import SftObjective
from relax_core.model import MtpConfig
from relax_core.packing import PackedLayout
from relax_core.trainer.objective import Terms
from relax_core.trainer.optimizer import NonFiniteGradientError


@pytest.fixture
def objective():
    return SftObjective(AlgorithmConfig(name="sft"))


def gradients(trainer):
    return {
        name: parameter.main_grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }


def test_scores_are_the_log_softmax_of_the_models_logits(make_trainer, samples):
    trainer = make_trainer(micro_batch_tokens=20)
    for sample, score in zip(samples, trainer.score(samples, temperature=0.7), strict=True):
        with torch.no_grad():
            hidden_TD = trainer.model(sample.tokens_L, PackedLayout.build([len(sample.tokens_L)]))
            logprobs_TV = F.log_softmax(trainer.model.logits(hidden_TD).double() / 0.7, dim=-1)
        expected = torch.zeros(len(sample.tokens_L))
        for place in range(1, len(sample.tokens_L)):
            if sample.mask_L[place] > 0:
                expected[place] = logprobs_TV[place - 1, sample.tokens_L[place]]
        assert torch.allclose(score, expected, atol=2e-6)


@pytest.mark.parametrize("budget", [1, 18, 30, 10_000])
def test_loss_and_gradients_do_not_depend_on_the_micro_batches(make_trainer, samples, objective, budget):
    whole = make_trainer(micro_batch_tokens=10_000)
    reference = whole.step(samples, objective)
    split = make_trainer(micro_batch_tokens=budget)
    metrics = split.step(samples, objective)
    assert metrics.values == pytest.approx(reference.values, rel=2e-5, abs=1e-6)
    expected = gradients(whole)
    for name, gradient in gradients(split).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6), name


def test_the_loss_is_the_mean_over_all_target_tokens(make_trainer, samples, objective):
    trainer = make_trainer(mtp_layers=0, micro_batch_tokens=20)
    scores = trainer.score(samples)
    targets = sum(int(sample.mask_L.sum()) for sample in samples)
    expected = -sum(float(score.double().sum()) for score in scores) / targets
    assert trainer.step(samples, objective).values["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_draft_loss_leaves_the_trunks_gradient_untouched_by_default(make_trainer, samples, objective):
    without = make_trainer(mtp=MtpConfig(loss_coefficient=0), clip_grad=0)
    without.step(samples, objective)
    expected = gradients(without)
    trainer = make_trainer(mtp=MtpConfig(loss_coefficient=0.5), clip_grad=0)
    values = trainer.step(samples, objective).values
    assert 0 < values["mtp_acceptance_0"] <= 1
    for name, gradient in gradients(trainer).items():
        if name.startswith("mtp."):
            assert name not in expected
        else:
            assert torch.equal(gradient, expected[name]), name
    assert any(gradient.any() for name, gradient in gradients(trainer).items() if name.startswith("mtp."))


def test_a_batch_without_any_target_changes_nothing_but_by_weight_decay(make_trainer, samples, objective):
    trainer = make_trainer(weight_decay=0.0)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    values = trainer.step([samples[1], samples[3]], objective).values
    assert values["loss"] == 0
    assert values["grad_norm"] == 0
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters())


@pytest.mark.parametrize(
    ("schedule", "decay"),
    [
        ("cosine", [1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(1, 5)]),
        ("linear", [1e-3 + 9e-3 * (1 - i / 4) for i in range(1, 5)]),
        ("constant", [1e-2] * 4),
    ],
)
def test_the_learning_rate_warms_up_and_decays_over_the_run(
    make_trainer, samples, objective, schedule, decay
):
    trainer = make_trainer(steps=6, warmup_steps=2, schedule=schedule, min_lr=1e-3)
    rates = [trainer.step(samples, objective).values["lr"] for _ in range(6)]
    assert rates == pytest.approx([5e-3, 1e-2, *decay])


def test_a_warm_up_as_long_as_the_run_is_refused(make_trainer):
    with pytest.raises(ValueError, match="the run takes 3 optimizer steps: give at most 2"):
        make_trainer(steps=3, warmup_steps=3)


def test_gradients_are_clipped_to_the_norm(make_trainer, samples, objective):
    trainer = make_trainer(clip_grad=0.25, mtp_layers=0, beta1=0.9)
    norm = trainer.step(samples, objective).values["grad_norm"]
    whole = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients(trainer).values()))
    assert norm == pytest.approx(whole, rel=1e-5)
    assert norm > 0.25
    # After the first step Adam's mean is a tenth of the gradient that it was given.
    (adam,) = trainer.training.adams
    given = math.sqrt(sum(float(s["exp_avg"].double().pow(2).sum()) for s in adam.state.values())) / 0.1
    assert given == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gradient_precision": "bf16"}, "set gradient_precision to fp32, or precision to bf16"),
        ({"overlap_param_gather": True}, "set overlap_grad_reduce to true"),
    ],
)
def test_number_formats_and_overlaps_that_do_not_fit_are_refused(make_trainer, settings, words):
    with pytest.raises(ValueError, match=words):
        make_trainer(**settings)


def test_draft_layers_without_a_loss_stay_as_they_are_under_weight_decay(make_trainer, samples, objective):
    trainer = make_trainer(mtp=MtpConfig(loss_coefficient=0), weight_decay=0.1)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.step(samples, objective)
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(before[n], p)}
    assert changed == {name for name in before if not name.startswith("mtp.")}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_run_and_leaves_the_weights(make_trainer, samples, bad):
    class Broken(SftObjective):
        def terms(self, scored, columns_S, sequences):
            terms = super().terms(scored, columns_S, sequences)
            return Terms([replace(term, value_T=term.value_T * bad) for term in terms.terms])

    trainer = make_trainer(warmup_steps=2)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    broken = trainer.step(samples, Broken(AlgorithmConfig(name="sft")))
    for _ in range(2):
        with pytest.raises(NonFiniteGradientError, match="the optimizer step was not taken"):
            _ = broken.values
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    values = trainer.step(samples, SftObjective(AlgorithmConfig(name="sft"))).values
    assert values["lr"] == pytest.approx(5e-3)
    assert math.isfinite(values["grad_norm"])


def test_draft_layers_alone_train_like_beside_the_trunk_and_leave_it_as_it_is(
    make_trainer, samples, objective
):
    both = make_trainer(mtp=MtpConfig(loss_coefficient=0.5), mtp_layers=2, clip_grad=0)
    alone = make_trainer(mtp=MtpConfig(loss_coefficient=0.5, only=True), mtp_layers=2, clip_grad=0)
    before = {name: parameter.detach().clone() for name, parameter in alone.model.named_parameters()}
    wanted, got = both.step(samples, objective).values, alone.step(samples, objective).values
    shared = {name: value for name, value in wanted.items() if name not in ("loss", "grad_norm")}
    assert {name: got[name] for name in shared} == pytest.approx(shared)
    assert got["loss"] == pytest.approx(0.25 * (got["mtp_loss_0"] + got["mtp_loss_1"]))
    expected = gradients(both)
    for name, gradient in gradients(alone).items():
        assert name.startswith("mtp.")
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
    changed = {n for n, p in alone.model.named_parameters() if not torch.equal(before[n], p)}
    assert changed == {name for name in before if name.startswith("mtp.")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mtp_layers": 0, "mtp": MtpConfig(only=True)}, "the model has 0 draft depths"),
        ({"mtp": MtpConfig(only=True, loss_coefficient=0)}, "a coefficient above 0"),
        ({"mtp": MtpConfig(only=True), "overlap_grad_reduce": True}, "set overlap_grad_reduce and"),
        ({"mtp_layers": 2, "mtp": MtpConfig(repeated=2)}, "set mtp.repeated to 1"),
    ],
)
def test_draft_settings_that_do_not_fit_are_refused(make_trainer, options, words):
    with pytest.raises(ValueError, match=words):
        make_trainer(**options)
