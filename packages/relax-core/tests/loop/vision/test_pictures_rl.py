"""Reinforcement learning, preferences and distillation on prompts with pictures, from files to a model.

Every prompt of the task is the same text, so that who does not see the pictures is right in a quarter of the
cases at best.
"""

import json
import logging
from statistics import fmean

import pytest
import torch
from relax_core.data import DataConfig, DataError, load_prompts, load_tokenizer
from relax_core.data.pictures import PictureReader
from relax_core.data.problems import RowError
from relax_core.loop.weights import WeightMismatchError
from relax_core.testing.colours import COLOURS
from relax_core.testing.runs import records, start, weights
from relax_rollout.engines.transformers.engine import TransformersEngine

TOWER = "model.visual."


def changed(before, after) -> set[bool]:
    """Whether weights of the tower changed, and whether others did."""
    return {name.startswith(TOWER) for name in before if not torch.equal(before[name], after[name])}


def test_colours_are_learnt_by_grpo_and_the_engine_sees_what_the_trainer_sees(colours_run, colours, tmp_path):
    directory = start(colours_run(run={"steps": 16}), tmp_path / "run")
    steps = records(directory)
    steps = [step for step in steps if "reward" in step]
    # Float32 on both sides, with a cache and without; a picture that one of them does not see gives 0.1.
    assert max(step["logprob_gap_max"] for step in steps) < 1e-5
    assert steps[0]["reward"] < 0.25 < 0.6 < fmean(step["reward"] for step in steps[-3:])
    assert changed(weights(colours / "model"), weights(directory.hf)) == {True, False}


@pytest.fixture
def loaded(monkeypatch):
    """Names of weights that each update brought to the embedded engine."""
    updates = []
    begin, load = TransformersEngine.begin_update, TransformersEngine.load

    async def begin_update(engine, version, kept=()):
        updates.append([])
        return await begin(engine, version, kept)

    async def note(engine, bucket):
        updates[-1] += bucket
        await load(engine, bucket)

    monkeypatch.setattr(TransformersEngine, "begin_update", begin_update)
    monkeypatch.setattr(TransformersEngine, "load", note)
    return updates


def test_a_frozen_tower_stays_and_does_not_travel(colours_run, colours, tmp_path, loaded):
    directory = start(
        colours_run(model={"vision": "frozen", "path": str(colours / "model")}), tmp_path / "run"
    )
    before, after = weights(colours / "model"), weights(directory.hf)
    assert changed(before, after) == {False}
    text = {name for name in before if not name.startswith(TOWER)}
    assert [set(names) for names in loaded] == [text] * 3
    assert max(step["logprob_gap_max"] for step in records(directory) if "reward" in step) < 1e-5


def test_a_frozen_tower_is_exported_as_it_was_in_half_precision_too(colours_run, colours, tmp_path):
    """The checkpoint is float32: what went through bf16 would be rounded."""
    config = colours_run(
        model={"vision": "frozen", "path": str(colours / "model")},
        trainer={"lr": 1e-2, "precision": "bf16"},
        run={"steps": 1},
    )
    assert changed(weights(colours / "model"), weights(start(config, tmp_path / "run").hf)) == {False}


def test_a_trained_tower_travels_with_every_update(colours_run, colours, tmp_path, loaded):
    start(colours_run(), tmp_path / "run")
    assert [set(names) for names in loaded] == [set(weights(colours / "model"))] * 3


def test_a_kept_tower_that_differs_in_the_engine_ends_the_run(colours_run, colours, tmp_path, monkeypatch):
    load = TransformersEngine.load

    async def damage(engine, bucket):
        await load(engine, bucket)
        with torch.inference_mode():
            engine._model.model.visual.merger.norm.bias.add_(1)

    monkeypatch.setattr(TransformersEngine, "load", damage)
    config = colours_run(model={"vision": "frozen", "path": str(colours / "model")})
    with pytest.raises(WeightMismatchError, match=r"for 1 of \d+ tensors: model.visual.merger.norm.bias"):
        start(config, tmp_path / "run")


def test_a_critic_sees_the_pictures(colours_run, tmp_path):
    """Under one advantage estimate of all prompts its values can only differ by the picture."""
    ppo = {
        "algorithm": {"name": "ppo"},
        "critic": {"lr": 5e-3, "warmup_steps": 24},
        "run": {"steps": 25},
        "rollout": {"prompts_per_step": 32, "samples_per_prompt": 2, "max_new_tokens": 1},
        "reward": {"function": "colour_reward:red_is_good"},
    }
    (tmp_path / "colour_reward.py").write_text(
        "def red_is_good(item):\n    return float(item.answer == 'red')\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        directory = start(colours_run(**ppo), tmp_path / "run")
    explained = [step["explained_variance"] for step in records(directory) if "explained_variance" in step]
    # A value that is the same for all prompts explains none of it.
    assert explained[-1] > 0.5


def test_a_teacher_in_the_trainer_sees_the_pictures(colours_run, colours, tmp_path):
    distillation = {
        "algorithm": {"name": "on_policy_distillation"},
        "teacher": {"path": str(colours / "model")},
        "run": {"steps": 1},
    }
    directory = start(colours_run(**distillation), tmp_path / "run")
    (step,) = [step for step in records(directory) if "teacher_kl" in step]
    # The teacher is the policy as it starts.
    assert abs(step["teacher_kl"]) < 1e-6


def test_preferences_are_learnt_from_pictures(colours_run, colours, tmp_path):
    rows = [json.loads(line) for line in (colours / "rows.jsonl").read_text().splitlines()]
    names = list(COLOURS)
    for row in rows:
        other = names[(names.index(row.pop("answer")) + 1) % 4]
        row["prompt"] = row.pop("messages")
        row |= {"chosen": names[names.index(other) - 1], "rejected": other}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "pairs.jsonl"), "images_key": "images", "images_root": str(colours)}
    dpo = {"algorithm": {"name": "dpo"}, "sft": {"samples_per_step": 32}, "run": {"steps": 12}}
    directory = start(colours_run(data=data, **dpo), tmp_path / "run")
    steps = [step for step in records(directory) if "preference_accuracy" in step]
    # Each colour is as often the better as the worse one: 0.5 for who does not see.
    assert steps[-1]["preference_accuracy"] == 1
    assert steps[-1]["preference_margin"] > 1


@pytest.fixture
def read(colours):
    """Prompts as the loop reads them."""

    def prompts(**settings):
        given = {"path": str(colours / "rows.jsonl"), "images_key": "images"} | settings
        cfg = DataConfig(**given)
        config = json.loads((colours / "model" / "config.json").read_text())
        reader = PictureReader.open(colours / "model", config, cfg) if cfg.images_key else None
        return load_prompts(cfg, load_tokenizer(colours / "model"), seed=0, pictures=reader)

    return prompts


def test_a_prompt_has_one_token_for_each_square_of_its_picture(read):
    image = 4
    for prompt in read().train:
        (one,) = prompt.pictures
        places = [i for i, token in enumerate(prompt.ids) if token == image]
        assert places == list(range(one.start, one.start + one.kept.tokens))
        assert prompt.messages[0]["content"][0] == {"type": "image"}
        assert prompt.prompt_text.endswith(one.kept.key)


def test_a_prompt_cut_from_the_front_keeps_whole_pictures_only(read):
    """Nine tokens stand behind a picture, of one token or of several."""
    assert all(one.pictures == () for one in read(max_tokens=9, overlong="truncate").train)
    kept = read(max_tokens=10, overlong="truncate", max_bad_rows=32)
    assert [one.pictures[0].start for one in kept.train] == [0] * len(kept.train)
    assert {one.pictures[0].kept.tokens for one in kept.train} == {1}
    assert len(kept.train) + len(kept.bad_rows) == 32
    assert "data.max_tokens = 10 cuts picture 1, whose 4 tokens begin at 4" in kept.bad_rows[0].reason


def test_prompts_with_pictures_that_nobody_reads_are_refused(read):
    with pytest.raises(DataError, match=r"has pictures: set data.images_key and model"):
        read(images_key=None)


def test_a_kept_picture_that_is_damaged_is_made_again(read, tmp_path, caplog):
    """Cut before the run starts, and overwritten while it goes on."""
    first = read(image_cache=tmp_path / "kept").train[0].pictures[0].kept
    wanted = first.load().patches()
    for damage in (
        lambda data: data[:-30],
        lambda data: data[:200] + b"\0\1\2\3" * 8 + data[232:],
        lambda _: b"",
    ):
        whole = first.file.read_bytes()
        first.file.write_bytes(damage(whole))
        with caplog.at_level(logging.WARNING):
            again = read(image_cache=tmp_path / "kept").train[0].pictures[0].kept.load()
        assert [record.getMessage().split(" is damaged")[0] for record in caplog.records] == [
            f"kept picture {first.file}"
        ]
        caplog.clear()
        assert (again.patches() == wanted).all()
        assert first.file.read_bytes() == whole
        first.file.write_bytes(damage(whole))
        assert (first.load().patches() == wanted).all()
        assert len(caplog.records) == 1
        caplog.clear()


def test_a_kept_picture_whose_source_has_gone_is_refused_by_name(colours, read, tmp_path):
    (tmp_path / "a.png").write_bytes((colours / "rows-0.png").read_bytes())
    row = json.loads((colours / "rows.jsonl").read_text().splitlines()[0]) | {"images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data = read(path=str(tmp_path / "rows.jsonl"), image_cache=tmp_path / "kept")
    kept = data.train[0].pictures[0].kept
    kept.file.write_bytes(b"")
    (tmp_path / "a.png").write_bytes((colours / "rows-1.png").read_bytes())
    with pytest.raises(RowError, match=r"its source .*a.png has changed since"):
        kept.load()
    (tmp_path / "a.png").unlink()
    with pytest.raises(RowError, match=r"its source cannot be read again: picture .*a.png cannot be read"):
        kept.load()
