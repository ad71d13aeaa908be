import pytest
from relax_core.config import ConfigError, RelaxConfig, dump_config, load_config, resolve
from relax_core.config.fields import field_rows
from relax_core.config.layer import Layer
from relax_core.config.yaml_text import parse_yaml
from relax_core.data.config import DataConfig


def problems(recipe, *flags):
    with pytest.raises(ConfigError) as caught:
        load_config(str(recipe), [*flags, "--data.path", "rows.jsonl"])
    return {".".join(p.path) or p.given: p for p in caught.value.problems}


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        return file

    return write


def test_all_problems_of_recipe_and_flags_are_reported_at_once(recipe):
    file = recipe(
        "run:\n  device: cdua\n  steps: many\ntrainer:\n  lrr: 1\nrollouts:\n  top_p: 1\nalgorithm: 3\n"
    )
    found = problems(file, "--rollout.temperature", "-1", "--lr", "2", "--eval.before", "yes")
    assert set(found) == {
        "run.device",
        "run.steps",
        "trainer.lrr",
        "rollouts",
        "algorithm",
        "rollout.temperature",
        "--lr",
        "eval.before",
    }
    device = found["run.device"]
    assert device.given == "cdua"
    assert device.origin == "mine.yaml, line 2"
    assert device.allowed == "one of auto, cpu, cuda, npu"
    assert device.nearest == "cuda"
    assert found["run.steps"].allowed == "an integer, at least 1"
    assert found["trainer.lrr"].nearest == "trainer.lr"
    assert "micro_batch_tokens" in found["trainer.lrr"].allowed
    assert found["rollouts"].nearest == "rollout"
    assert found["rollout.temperature"].origin == "--rollout.temperature"
    assert found["rollout.temperature"].allowed == "a number, at least 0"
    assert found["--lr"].nearest == "--trainer.lr"
    assert found["eval.before"].allowed == "true or false"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("run.steps", '"3"'),
        ("run.steps", "3.5"),
        ("run.steps", "true"),
        ("trainer.lr", '"1e-3"'),
        ("trainer.lr", ".nan"),
        ("trainer.lr", "-1"),
        ("trainer.beta1", "1"),
        ("eval.before", "1"),
        ("run.name", "12"),
        ("run.name", "a/b"),
        ("rollout.engine", "vllm"),
        ("trainer.lr", "1e38"),
        ("run.threads", "1000000"),
        ("rollout.top_k", "10000000000000000000000"),
        ("reward.timeout_s", "1e300"),
        ("algorithm.clip_high", "1e300"),
        ("data.limit", "10000000000000000000000"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(recipe, setting, value):
    section, name = setting.split(".")
    found = problems(recipe(f"{section}:\n  {name}: {value}\n"))
    assert list(found) == [setting]
    assert found[setting].allowed


def test_rules_across_sections_are_reported_beside_other_problems():
    found = problems(
        "quickstart",
        *("--run.steps", "5", "--trainer.warmup_steps", "6"),
        *("--rollout.samples_per_prompt", "1", "--checkpoint.keep", "0"),
    )
    assert set(found) == {"trainer.warmup_steps", "rollout.samples_per_prompt", "checkpoint.keep"}
    assert found["trainer.warmup_steps"].allowed == "an integer, at most 4"


def test_rules_across_sections_hold_for_configs_made_in_python():
    config = load_config("quickstart")
    with pytest.raises(ValueError, match="warm-up takes the whole run"):
        RelaxConfig(
            data=config.data,
            run=config.run.model_copy(update={"steps": 1}),
            trainer=config.trainer.model_copy(update={"warmup_steps": 2}),
        )


@pytest.mark.parametrize(
    ("flags", "name", "allowed"),
    [
        (
            ("--run.steps", "5", "--trainer.warmup_steps", "5"),
            "trainer.warmup_steps",
            "an integer, at most 4",
        ),
        (
            ("--parallel.tensor", "2"),
            "cluster.trainer_ranks",
            "a multiple of 2, with cluster.mode ray or under torchrun",
        ),
        (
            ("--cluster.mode", "ray", "--cluster.engines", "2", "--algorithm.name", "sft"),
            "cluster.engines",
            "1",
        ),
        (
            ("--cluster.mode", "ray", "--cluster.placement", "async", "--algorithm.correction", "none"),
            "algorithm.correction",
            "truncated or icepop",
        ),
        (
            ("--model.reference_path", "elsewhere"),
            "model.reference_path",
            "null, or set algorithm.kl_loss_coef",
        ),
    ],
)
def test_what_would_fail_or_be_ignored_later_is_refused_at_once(flags, name, allowed):
    found = problems("quickstart", *flags)
    assert list(found) == [name]
    assert found[name].allowed.startswith(allowed)


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_numbers_must_be_finite(recipe, value):
    text = (
        f"reward: {{failed_score: {value}}}\ntrainer: {{eps: {value}}}\nrollout: {{over_sampling: {value}}}\n"
    )
    found = problems(recipe(text))
    assert set(found) == {"reward.failed_score", "trainer.eps", "rollout.over_sampling"}
    assert found["reward.failed_score"].message == "must be finite"


@pytest.mark.parametrize("text", ["a\0b", "caf\udce9"])
def test_bytes_that_are_no_text_are_refused_by_name(text):
    found = problems("quickstart", "--run.dir", text)
    assert found["run.dir"].message.startswith("is no text")
    assert found["run.dir"].given == ascii(text)
    assert found["run.dir"].origin == "--run.dir"
    str(found["run.dir"]).encode()


def test_later_layers_win_and_mappings_merge():
    below = Layer({"run": {"steps": 3, "seed": 7}, "data": {"path": "rows.jsonl"}})
    config = resolve(RelaxConfig, [below, Layer({"run": {"steps": 4}})])
    assert (config.run.steps, config.run.seed) == (4, 7)


def test_an_empty_section_is_a_section_of_defaults(recipe):
    file = recipe("run:\n  # steps: 3\ndata: {path: rows.jsonl}\n")
    assert load_config(str(file)) == RelaxConfig(data=DataConfig(path="rows.jsonl"))


def test_an_empty_section_takes_nothing_away_from_the_recipe_below(recipe):
    file = recipe("extends: quickstart\ntrainer:\n  # lr: 1\n")
    assert load_config(str(file)) == load_config("quickstart")


def test_a_required_setting_that_is_missing_is_named(recipe):
    with pytest.raises(ConfigError) as caught:
        load_config(str(recipe("run:\n  steps: 3\n")))
    (problem,) = caught.value.problems
    assert problem.path == ("data", "path")
    assert problem.message == "must be set"


@pytest.mark.parametrize("name", ["quickstart", "quickstart-sft"])
def test_the_resolved_config_survives_a_round_trip_in_field_order(name, tmp_path):
    config = load_config(name, ["--trainer.lr", "3e-7", "--run.name", "007"])
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(str(file)) == config
    values, _ = parse_yaml(file.read_text())
    assert [f"{s}.{n}" for s in values for n in values[s]] == [row.name for row in field_rows(RelaxConfig)]


def test_the_error_text_is_readable():
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", ["--run.device", "tpu"])
    assert str(caught.value) == (
        "1 problem in the configuration\n\n"
        "  run.device = tpu   (--run.device)\n"
        "      not allowed\n"
        "      allowed: one of auto, cpu, cuda, npu\n"
        "      did you mean npu?"
    )
