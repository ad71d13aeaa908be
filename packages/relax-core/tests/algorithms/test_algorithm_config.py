import subprocess
import sys

import pytest
from pydantic import ValidationError
from relax_core.algorithms import AlgorithmConfig, algorithm_names


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        ("grpo", "sequence_mean"),
        ("dr_grpo", "fixed_length"),
        ("dapo", "token_mean"),
        ("rloo", "sequence_sum"),
        ("sft", "token_mean"),
    ],
)
def test_the_algorithm_chooses_its_reduction_until_the_user_does(name, reduction):
    assert AlgorithmConfig(name=name).token_reduction == reduction
    assert AlgorithmConfig(name=name, reduction="token_mean").token_reduction == "token_mean"


@pytest.mark.parametrize(
    ("settings", "band"),
    [
        ({"correction": "none"}, (0.0, float("inf"))),
        ({}, (0.0, 2.0)),
        ({"correction_high": 3.0}, (0.0, 3.0)),
        ({"correction": "icepop"}, (0.5, 5.0)),
        ({"correction": "icepop", "correction_low": 0.1, "correction_high": 8.0}, (0.1, 8.0)),
    ],
)
def test_the_band_of_the_correction(settings, band):
    assert AlgorithmConfig(**settings).correction_band == band


@pytest.mark.parametrize(
    ("settings", "clip", "kl"),
    [
        ({}, (0.2, 0.28), "low_var"),
        ({"clip_low": 0.1}, (0.1, 0.28), "low_var"),
        ({"name": "gspo"}, (3e-4, 4e-4), "low_var"),
        ({"name": "cispo"}, (1.0, 4.0), "low_var"),
        ({"name": "reinforce_plus_plus"}, (0.2, 0.28), "k1"),
        ({"name": "reinforce_plus_plus_baseline", "kl": "k3"}, (0.2, 0.28), "k3"),
    ],
)
def test_the_algorithm_chooses_clip_and_kl_until_the_user_does(settings, clip, kl):
    config = AlgorithmConfig(**settings)
    assert (config.clip_range, config.kl_estimator) == (clip, kl)


def test_a_reference_is_needed_only_by_a_kl():
    assert not AlgorithmConfig().needs_reference
    assert AlgorithmConfig(kl_loss_coef=0.1).needs_reference
    assert AlgorithmConfig(kl_reward_coef=0.1).needs_reference


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "gppo"},
            "unknown algorithm 'gppo': allowed are cispo, .*, or your own as module:name",
        ),
        ({"clip_low": 1.1}, "less than or equal to 1"),
        ({"clip_low": 0.0}, "greater than 0"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"advantage_eps": 0.0}, "greater than 0"),
        ({"kl_loss_coef": -0.1}, "greater than or equal to 0"),
        ({"kl_loss_coef": float("nan")}, "finite|greater"),
        ({"kl": "k4"}, "'k1', 'k2', 'k3' or 'low_var'"),
        ({"kl_loss_coef": 0.1, "kl_reward_coef": 0.2}, "would count the KL twice: set one of them to 0"),
        ({"name": "ppo", "kl_loss_coef": 0.1}, "estimator k1 has a gradient of mean zero"),
        ({"correction_low": 0.5}, "no effect with correction 'truncated'"),
        ({"correction": "none", "correction_high": 2.0}, "no effect with correction 'none'"),
        ({"correction": "icepop", "correction_high": 0.9}, "greater than or equal to 1"),
        ({"fixed_length": 100}, "no effect with reduction 'sequence_mean'"),
        ({"name": "sft", "kl_loss_coef": 0.1}, "kl_loss_coef 0.1 has no effect with algorithm 'sft'"),
        ({"name": "sft", "reduction": "group_mean"}, "allowed are sequence_mean, token_mean"),
        ({"name": "dr_grpo", "advantage_eps": 1e-4}, "advantage_eps 0.0001 has no effect"),
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip 3.0 has no effect"),
        ({"name": "sapo", "clip_high": 0.3}, "clip_high 0.3 has no effect"),
        ({"name": "grpo", "gate_negative": 1.1}, "gate_negative 1.1 has no effect"),
        ({"name": "gspo", "reduction": "token_mean"}, "allowed are sequence_mean"),
        ({"name": "reinforce_plus_plus_baseline", "kl_reward_coef": 0.1}, "kl_reward_coef 0.1 has no effect"),
        ({"name": "json:loads"}, "is a function: it must be a relax_core.algorithms.Algorithm"),
        ({"name": "nowhere_at_all:X"}, "cannot be imported: No module named 'nowhere_at_all'"),
        ({"normalise": True}, "Extra inputs"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(settings, message):
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(**settings)


def test_all_contradictions_are_named_at_once():
    with pytest.raises(ValidationError, match=r"(?s)twice.*correction_low") as caught:
        AlgorithmConfig(kl_loss_coef=0.1, kl_reward_coef=0.1, correction_low=0.1, fixed_length=4)
    assert "fixed_length 4" in str(caught.value)


@pytest.mark.parametrize("name", algorithm_names())
def test_a_written_config_reads_back_the_same(name):
    config = AlgorithmConfig(name=name)
    assert AlgorithmConfig.model_validate_json(config.model_dump_json(), strict=True) == config


def test_every_field_has_a_meaning_and_the_names_are_listed():
    properties = AlgorithmConfig.model_json_schema()["properties"]
    assert all(field.get("description") for field in properties.values())
    assert properties["name"]["enum"] == list(algorithm_names())


def test_the_settings_import_without_torch_or_transformers():
    code = (
        "import sys, relax_core.algorithms\n"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)\n"
        "relax_core.algorithms.policy_objective\n"
        "assert not {'transformers', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
