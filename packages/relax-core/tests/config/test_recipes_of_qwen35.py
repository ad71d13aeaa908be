"""The recipes of Qwen3.5: parsed, planned and explained; names say what is in them; nothing of a machine."""

import re

import pytest
from relax_core.cli.preflight import refuse_unready
from relax_core.config import ConfigError, load_config
from relax_core.config.yaml_text import parse_yaml
from relax_core.plan import plan
from relax_core.plan.text import plan_lines, plan_values
from relax_core.recipes import STATUS, builtin_recipes, describe_recipe, read_recipe, recipe_status

QWEN = [name for name in builtin_recipes() if name.startswith("qwen35")]
NAME = re.compile(
    r"qwen35-(?P<model>4b|9b|35b-a3b)(?P<sft>-sft)?(?P<mtp>-mtp)?(?P<cp>-cp)?-(?P<count>\d+)x(?P<device>npu|cuda)"
    r"(?P<kind>-thd|-tuned)?"
)
DEMANDED = {
    "qwen35-9b-mtp-8xnpu-thd",
    "qwen35-9b-cp-16xnpu",
    "qwen35-35b-a3b-sft-mtp-8xnpu",
    "qwen35-35b-a3b-16xnpu-thd",
    "qwen35-9b-16xnpu-tuned",
    "qwen35-35b-a3b-32xnpu-tuned",
    "qwen35-9b-mtp-cp-16xnpu",
    "qwen35-35b-a3b-mtp-16xnpu",
    "qwen35-9b-mtp-8xcuda",
    "qwen35-9b-cp-8xcuda",
    "qwen35-9b-mtp-cp-8xcuda",
    "qwen35-35b-a3b-8xcuda",
    "qwen35-35b-a3b-mtp-8xcuda",
    "qwen35-35b-a3b-sft-mtp-8xcuda",
    "qwen35-9b-mtp-2xcuda",
    "qwen35-9b-mtp-1xcuda",
    "qwen35-4b-mtp-2xcuda",
    "qwen35-4b-mtp-1xcuda",
    "qwen35-4b-mtp-2xnpu",
    "qwen35-4b-mtp-1xnpu",
}


def smallest_device(name: str) -> str:
    """The device that a recipe's description asks for at least."""
    if "xnpu" in name:
        return "910c-die"
    (gigabytes,) = re.findall(r"of (\d+) GB", describe_recipe(builtin_recipes()[name]))
    return {"80": "h100", "141": "h200"}[gigabytes]


def test_the_recipes_asked_for_are_there():
    assert set(QWEN) >= DEMANDED


@pytest.mark.parametrize("name", QWEN)
def test_a_name_says_what_is_in_the_recipe(name):
    words = NAME.fullmatch(name)
    assert words, name
    config = load_config(name)
    assert config.model.path.lower().endswith(f"qwen3.5-{words['model']}")
    assert (config.algorithm.name == "sft") == bool(words["sft"])
    assert (config.mtp.loss_coefficient > 0) == bool(words["mtp"])
    assert (config.rollout.draft_tokens > 0) == (bool(words["mtp"]) and not words["sft"])
    assert (config.parallel.context > 1) == bool(words["cp"])
    assert config.run.device == words["device"]
    assert config.trainer.packing == "thd", "rows are packed in all of them"
    assert config.cluster.trainer_ranks == int(words["count"]), "ranks are dies, not cards"
    text = describe_recipe(builtin_recipes()[name])
    if words["device"] == "npu" and int(words["count"]) > 1:
        number = {"2": "one", "4": "2"}.get(words["count"], str(int(words["count"]) // 2))
        assert f"({number} " in text or f"of {int(words['count']) // 4} " in text, (
            "cards are half of the dies"
        )


@pytest.mark.parametrize("name", QWEN)
def test_a_recipe_is_planned_and_explained_on_the_smallest_device_that_it_names(name):
    made = plan(load_config(name), recipe=name, device=smallest_device(name))
    assert made.problems == ()
    assert made.fits
    text = "\n".join(plan_lines(made))
    for words in ("weights", "optimizer", "Time of a step", "device-hours", "assumed:"):
        assert words in text
    assert plan_values(made)["devices"], "and as values"
    assert len(made.devices) == load_config(name).cluster.trainer_ranks


@pytest.mark.parametrize("name", builtin_recipes())
def test_a_recipe_holds_nothing_of_a_machine(name):
    text = builtin_recipes()[name].read_text()
    assert not re.search(r"(?<![\w.:])/(?:home|mnt|data|root|workspace|tmp)\b", text), "a path of a machine"
    assert not re.search(r"enp\w+|eth\d|ib\d|IFNAME|API_KEY|TOKEN|sk-|hf_\w{8}", text)
    assert recipe_status(builtin_recipes()[name]) in STATUS


# What a start asks of the machine, whatever the recipe: devices, and files of the user.
OF_THE_MACHINE = {("run", "device"), ("model", "path"), ("data", "path"), ("data", "eval_path")}


@pytest.mark.parametrize("name", QWEN)
def test_a_recipe_waits_if_and_only_if_a_start_refuses_a_part_of_it(name):
    with pytest.raises(ConfigError) as caught:
        refuse_unready(load_config(name))
    missing = [problem for problem in caught.value.problems if problem.path not in OF_THE_MACHINE]
    assert (recipe_status(builtin_recipes()[name]) == "waits") == bool(missing), missing


@pytest.mark.parametrize("name", QWEN)
def test_recipes_extend_and_do_not_repeat(name):
    values, _ = parse_yaml(builtin_recipes()[name].read_text())
    base = values.get("extends")
    if base is None:
        return
    below = read_recipe(base).values
    repeated = [
        f"{section}.{key}"
        for section, settings in values.items()
        if isinstance(settings, dict)
        for key, value in settings.items()
        if below.get(section, {}).get(key, ...) == value
    ]
    assert repeated == []


def test_the_reference_values_are_kept():
    """Those of the reference system's scripts that carry over as they are."""
    a, b = load_config("qwen35-9b-mtp-8xnpu-thd"), load_config("qwen35-9b-cp-16xnpu")
    assert (a.parallel.tensor, a.parallel.sequence, a.parallel.context) == (4, True, 1)
    assert (b.parallel.tensor, b.parallel.context) == (4, 4)
    assert (a.trainer.recompute, b.trainer.recompute) == ("full", "selective")
    assert a.trainer.micro_batch_tokens == 10240
    assert b.trainer.micro_batch_tokens == 8192 * b.parallel.context
    for one in (a, b):
        assert (one.rollout.prompts_per_step, one.rollout.samples_per_prompt) == (32, 8)
        assert (one.rollout.max_new_tokens, one.rollout.temperature) == (8192, 1.0)
        assert (one.algorithm.clip_low, one.algorithm.clip_high, one.algorithm.correction) == (
            0.2,
            0.28,
            "icepop",
        )
        assert (one.trainer.lr, one.trainer.weight_decay) == (1e-6, 0.1)
        assert (one.trainer.beta1, one.trainer.beta2) == (0.9, 0.98)
    assert (a.mtp.loss_coefficient, a.rollout.draft_tokens) == (0.1, 2)
    c, d = load_config("qwen35-35b-a3b-sft-mtp-8xnpu"), load_config("qwen35-35b-a3b-16xnpu-thd")
    assert (c.parallel.tensor, c.parallel.expert, c.parallel.expert_tensor) == (4, 8, 1)
    assert (c.mtp.loss_coefficient, c.trainer.lr, c.trainer.min_lr) == (0.2, 1e-5, 1e-6)
    assert (c.trainer.micro_batch_tokens, c.sft.samples_per_step, c.trainer.schedule) == (20480, 64, "cosine")
    assert (d.parallel.pipeline, d.parallel.expert, d.rollout.prompts_per_step) == (2, 8, 16)
    assert d.algorithm.correction == "truncated"
    f = load_config("qwen35-35b-a3b-32xnpu-tuned")
    assert (f.parallel.tensor, f.parallel.pipeline, f.parallel.expert) == (8, 2, 16)
    assert (f.trainer.recompute, f.trainer.micro_batch_tokens) == ("none", 20480)
