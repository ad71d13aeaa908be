"""What an algorithm declares is what the settings of a run are held to, field by field."""

import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from relax_core.algorithms import Algorithm, get_algorithm
from relax_core.config import ConfigError, load_config

GRPO = get_algorithm("grpo")
UNCORRECTED = {"settings": GRPO.settings - {"correction"}}
REFUSES = {
    "settings": ({"settings": GRPO.settings - {"dual_clip"}}, "algorithm.dual_clip=3", "algorithm.dual_clip"),
    "reductions": (
        {"reductions": frozenset({"sequence_mean"})}, "algorithm.reduction=token_mean", "algorithm.reduction",
    ),
    "default_kl": ({"default_kl": "k1"}, "algorithm.kl_loss_coef=0.1", "algorithm.kl"),
    "min_group_size": ({"min_group_size": 64}, "", "rollout.samples_per_prompt"),
    "on_policy": (
        {"on_policy": True},
        "trainer.optimizer_steps_per_batch=2", "trainer.optimizer_steps_per_batch",
    ),
    "needs_dynamic_sampling": ({"needs_dynamic_sampling": True}, "", "rollout.dynamic_sampling"),
    "needs_teacher": ({"needs_teacher": True}, "", "teacher.path"),
}  # fmt: skip
"""By field: another value of it, settings, and the field that is refused, which GRPO itself is not."""
ALLOWS = {
    "loop": (
        {"loop": "sft", "advantage": None, "policy_loss": None},
        "rollout.temperature=0", "rollout.temperature",
    ),
    "default_reduction": (
        {"default_reduction": "fixed_length"}, "algorithm.fixed_length=9", "algorithm.fixed_length",
    ),
    "needs_reference": ({"needs_reference": True}, "model.reference_path=there", "model.reference_path"),
    "needs_critic": (
        {"needs_critic": True, "value_target": lambda done, cfg: done.columns["value"]},
        "critic.lr=0.5", "critic.lr",
    ),
    "ratio_to": (
        UNCORRECTED | {"ratio_to": "rollout"},
        "rollout.early_abort=continue rollout.over_sampling=2", "algorithm.name",
    ),
}  # fmt: skip
"""By field: another value of it that allows settings which are refused without."""
READ_BY_THE_TRAINER = {
    "needs_scores", "advantage", "policy_loss", "value_target", "batch_columns", "level", "clip",
}  # fmt: skip
FOR_PEOPLE = {"name", "summary", "source", "objective", "advantage_formula"}


@pytest.fixture
def refused(monkeypatch):
    """Names of the fields that are refused with GRPO changed so, and these settings."""

    def of(change, settings):
        monkeypatch.setitem(sys.modules, "of_a_user", SimpleNamespace(MINE=replace(GRPO, **change)))
        try:
            load_config(
                "quickstart", [f"--{word}" for word in f"algorithm.name=of_a_user:MINE {settings}".split()]
            )
        except ConfigError as error:
            return {".".join(problem.path) for problem in error.problems}
        return set()

    return of


def test_every_field_of_a_declaration_is_accounted_for():
    assert {field.name for field in fields(Algorithm)} == {
        *REFUSES,
        *ALLOWS,
        *READ_BY_THE_TRAINER,
        *FOR_PEOPLE,
    }


@pytest.mark.parametrize(("change", "settings", "field"), REFUSES.values(), ids=REFUSES)
def test_a_declaration_refuses_what_it_cannot_do(refused, change, settings, field):
    assert field in refused(change, settings)
    assert not refused({}, settings)


@pytest.mark.parametrize(("change", "settings", "field"), ALLOWS.values(), ids=ALLOWS)
def test_a_declaration_allows_what_it_can_do(refused, change, settings, field):
    without = UNCORRECTED if "ratio_to" in change else {}
    assert field in refused(without, settings)
    assert not refused(change, settings)
