"""Going on with a run: from nothing, with more steps, and when it cannot be done."""

import shutil

import pytest
from relax_core.loop import run
from relax_core.run import RunDirectory
from relax_core.testing.runs import records
from relax_core.trainer.checkpoint import CheckpointError


def contents(directory):
    return {path: path.read_bytes() for path in sorted(directory.path.rglob("*")) if path.is_file()}


def longer(config, steps):
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})


@pytest.fixture
def config(small_run):
    return small_run(run={"steps": 2})


@pytest.fixture
def finished(config, tmp_path):
    with RunDirectory.create(tmp_path / "finished", config) as directory:
        run(config, directory, resume=False)
        yield directory


def test_without_a_checkpoint_it_begins_again(finished, config, tmp_path):
    with RunDirectory.create(tmp_path / "early", config) as directory:
        directory.metrics.write_bytes(finished.metrics.read_bytes().split(b"\n")[0] + b'\n{"step": 1, "rew')
        directory.samples.write_bytes(b'{"step": 1, "prompt": "lost"}\n')
        assert run(config, directory, resume=True) == "finished"
    assert records(directory) == records(finished)
    assert directory.samples.read_bytes() == finished.samples.read_bytes()


def test_a_finished_run_can_be_given_more_steps(finished, config, small_run, tmp_path):
    assert run(longer(config, 3), finished, resume=True) == "finished"
    assert [record["step"] for record in records(finished)] == [0, 1, 2, 3]
    assert "steps: 3" in finished.config.read_text()
    assert finished.steps_done() == 3


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"trainer": {"lr": 0.5}}, "trainer.lr: 0.01 is now 0.5"),
        ({"rollout": {"prompts_per_step": 5}}, "rollout.prompts_per_step: 4 is now 5"),
        ({"run": {"seed": 4, "steps": 3}}, "run.seed: 3 is now 4"),
        ({"run": {"steps": 1}}, "run.steps is 1, but .* has done 2 steps"),
    ],
)
def test_a_config_that_was_edited_is_refused(finished, small_run, sections, words):
    before = contents(finished)
    edited = small_run(**{"run": {"steps": 3}, **sections})
    with pytest.raises(ValueError, match=words):
        run(edited, finished, resume=True)
    assert contents(finished) == before


def test_files_that_moved_are_found_by_an_edited_config(finished, small_run, small_model, tmp_path):
    model = shutil.copytree(small_model, tmp_path / "moved")
    data = shutil.move(tmp_path / "task" / "train.jsonl", tmp_path / "rows.jsonl")
    changes = {"model": {"path": str(model)}, "data": {"path": str(data)}}
    assert run(small_run(run={"steps": 3, "name": "new"}, **changes), finished, resume=True) == "finished"


@pytest.mark.parametrize("damage", ["half", "manifest", "missing", "data"])
def test_what_cannot_be_resumed_is_refused_and_nothing_is_changed(finished, config, damage, tmp_path):
    newest = finished.checkpoints / "step_2"
    largest = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    words = f"checkpoint .*step_2 is damaged: {largest.name} "
    if damage == "half":
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    elif damage == "manifest":
        manifest = newest / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"bytes": ', '"bytes": 1'))
        words = "step_2 is damaged: .* bytes instead of 1"
    elif damage == "missing":
        largest.unlink()
    else:
        rows = tmp_path / "task" / "train.jsonl"
        rows.write_text(rows.read_text().replace("1", "2"))
        words = "the training data have changed since the run was saved"
    before = contents(finished)
    with pytest.raises(ValueError, match=words) as caught:
        run(longer(config, 3), finished, resume=True)
    assert contents(finished) == before
    assert damage == "data" or isinstance(caught.value, CheckpointError)
