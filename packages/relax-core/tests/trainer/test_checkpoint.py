import json
import random
import shutil
import threading

import numpy as np
import pytest
import torch
from relax_core.algorithms import AlgorithmConfig
from relax_core.loop.objectives import SftObjective
from relax_core.model import MtpConfig
from relax_core.run import RunDirectoryError
from relax_core.trainer.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    _seal,
    load_checkpoint,
    save_checkpoint,
)
from relax_core.trainer.folders import list_checkpoints, tidy_checkpoints

OBJECTIVE = SftObjective(AlgorithmConfig(name="sft"))


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [{}, {"mtp": MtpConfig(loss_coefficient=0)}, {"moe": True, "balance_coefficient": 0.1}],
    ids=["drafts", "frozen drafts", "experts"],
)
def test_going_on_from_a_checkpoint_equals_never_having_stopped(make_trainer, samples, tmp_path, options):
    options = {"schedule": "cosine", "warmup_steps": 2, **options}
    through = make_trainer(**options)
    for _ in range(2):
        through.step(samples, OBJECTIVE)
    save_checkpoint(tmp_path, 2, through, {"cursor": {"position": 7}}, keep=2)
    expected = [through.step(samples, OBJECTIVE).values for _ in range(3)]

    resumed = make_trainer(**options)
    assert load_checkpoint(tmp_path / "step_2", resumed) == {"cursor": {"position": 7}}
    assert [resumed.step(samples, OBJECTIVE).values for _ in range(3)] == expected
    first, second = weights(through), weights(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_that_is_given_more_steps_follows_the_schedule_of_its_new_length(
    make_trainer, samples, tmp_path
):
    short = make_trainer(schedule="linear", steps=2)
    assert [short.step(samples, OBJECTIVE).values["lr"] for _ in range(2)] == pytest.approx([5e-3, 0])
    save_checkpoint(tmp_path, 2, short, {}, keep=1)
    longer = make_trainer(schedule="linear", steps=5)
    load_checkpoint(tmp_path / "step_2", longer)
    rates = [longer.step(samples, OBJECTIVE).values["lr"] for _ in range(3)]
    assert rates == pytest.approx([4e-3, 2e-3, 0])


def test_only_the_newest_checkpoints_are_kept(make_trainer, samples, tmp_path):
    trainer = make_trainer()
    trainer.step(samples, OBJECTIVE)
    for step in (2, 9, 10):
        save_checkpoint(tmp_path, step, trainer, {}, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_9", "step_10"]


@pytest.mark.parametrize("room", [200, 20_000, 150_000])
def test_a_failed_save_says_why_makes_room_and_leaves_the_earlier_checkpoints(
    make_trainer, samples, tmp_path, file_size_limit, room
):
    trainer = make_trainer()
    trainer.step(samples, OBJECTIVE)
    save_checkpoint(tmp_path, 1, trainer, {}, keep=1)
    assert max(path.stat().st_size for path in (tmp_path / "step_1").iterdir()) > room
    words = r"cannot write .*step_2: .*limit on file sizes .*is reached; .* `relax-train --resume`"
    with file_size_limit(room), pytest.raises(RunDirectoryError, match=words):
        save_checkpoint(tmp_path, 2, trainer, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    load_checkpoint(tmp_path / "step_1", make_trainer())


def test_what_is_no_fault_of_the_disk_is_not_called_so(make_trainer, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("a defect")

    monkeypatch.setattr("relax_core.trainer.save_strategy.save", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        save_checkpoint(tmp_path, 1, make_trainer(), {}, keep=1)


@pytest.mark.parametrize("damage", ["cut", "flipped", "removed", "manifest"])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(make_trainer, samples, tmp_path, damage):
    trainer = make_trainer()
    trainer.step(samples, OBJECTIVE)
    directory = save_checkpoint(tmp_path, 1, trainer, {}, keep=1)
    victim = max((p for p in directory.iterdir() if p.suffix == ".distcp"), key=lambda p: p.stat().st_size)
    content = victim.read_bytes()
    if damage == "cut":
        victim.write_bytes(content[: len(content) // 2])
        words = f"{victim.name} has {len(content) // 2} bytes instead of {len(content)}"
    elif damage == "flipped":
        victim.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        words = f"{victim.name} has other content"
    elif damage == "removed":
        victim.unlink()
        words = f"{victim.name} is missing"
    else:
        victim = directory / "manifest.json"
        victim.write_text(victim.read_text()[:50])
        words = "no readable manifest.json"
    other = make_trainer()
    before = weights(other)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(directory, other)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(other).items())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda manifest: {}, r"common\.pt is not in manifest\.json; metadata\.json is not"),
        (lambda manifest: [], "no readable manifest.json"),
        (lambda manifest: {"common.pt": 3}, "no readable manifest.json"),
        (lambda manifest: {"common.pt": {}}, "no readable manifest.json"),
        (lambda manifest: {k: v for k, v in manifest.items() if "distcp" not in k}, r"distcp is not in"),
    ],
)
def test_an_edited_manifest_vouches_for_nothing(make_trainer, tmp_path, edit, words):
    trainer = make_trainer()
    directory = save_checkpoint(tmp_path, 1, trainer, {}, keep=1)
    file = directory / "manifest.json"
    file.write_text(json.dumps(edit(json.loads(file.read_text()))))
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(directory, trainer)


def test_a_checkpoint_of_another_model_is_refused_naming_its_tensors(make_trainer, samples, tmp_path):
    trainer = make_trainer(mtp_layers=1)
    trainer.step(samples, OBJECTIVE)
    directory = save_checkpoint(tmp_path, 1, trainer, {}, keep=1)
    with pytest.raises(CheckpointError, match=r"another model: .*mtp\.layers\.0"):
        load_checkpoint(directory, make_trainer(mtp_layers=0))


def test_a_half_written_directory_is_no_checkpoint(make_trainer, samples, tmp_path):
    trainer = make_trainer()
    trainer.step(samples, OBJECTIVE)
    directory = save_checkpoint(tmp_path, 1, trainer, {}, keep=1)
    shutil.copytree(directory, tmp_path / ".step_2.partial")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1"]
    assert json.loads((directory / "manifest.json").read_text()).keys() >= {"common.pt", ".metadata"}
    tidy_checkpoints(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_checkpoint_behind_training_hides_the_last_good_one_only_when_it_is_whole(
    make_trainer, samples, tmp_path, monkeypatch
):
    trainer = make_trainer()
    trainer.step(samples, OBJECTIVE)
    writer = CheckpointWriter(tmp_path, trainer, keep=1, asynchronous=True)
    writer.save(1, {})
    writer.finish()
    go_on = threading.Event()
    monkeypatch.setattr("relax_core.trainer.checkpoint._seal", lambda path: go_on.wait(60) and _seal(path))
    before = weights(trainer)
    writer.save(2, {"at": 2})
    trainer.step(samples, OBJECTIVE)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1"]
    go_on.set()
    writer.finish()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_2"]
    other = make_trainer()
    assert load_checkpoint(tmp_path / "step_2", other) == {"at": 2}
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(other).items())


def test_what_failed_behind_training_is_raised_by_the_next_save(
    make_trainer, samples, tmp_path, file_size_limit
):
    writer = CheckpointWriter(tmp_path, make_trainer(), keep=1, asynchronous=True)
    with file_size_limit(20_000):
        writer.save(1, {})
        with pytest.raises(RunDirectoryError, match=r"cannot write .*step_1"):
            writer.finish()
    writer.save(2, {})
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_draft_layers_that_are_named_may_be_added_and_are_trained_from_there(make_trainer, samples, tmp_path):
    trainer = make_trainer(mtp_layers=1)
    trainer.step(samples, OBJECTIVE)
    directory = save_checkpoint(tmp_path, 1, trainer, {}, keep=1)
    larger = make_trainer(mtp_layers=2)
    with pytest.raises(CheckpointError, match=r"missing .*mtp\.layers\.1"):
        load_checkpoint(directory, larger)
    with pytest.raises(CheckpointError, match=r"missing .*mtp\.layers\.1"):
        load_checkpoint(directory, larger, added=["mtp.layers.10."])
    fresh = weights(larger)
    load_checkpoint(directory, larger, added=["mtp.layers.1."])
    saved = weights(trainer)
    for name, tensor in weights(larger).items():
        assert torch.equal(tensor, fresh[name] if name.startswith("mtp.layers.1.") else saved[name]), name
    larger.step(samples, OBJECTIVE)
    assert not torch.equal(
        weights(larger)["mtp.layers.1.eh_proj.weight"], fresh["mtp.layers.1.eh_proj.weight"]
    )


def test_generators_go_on_where_they_stopped(make_trainer, tmp_path):
    trainer = make_trainer()
    directory = save_checkpoint(tmp_path, 1, trainer, {}, keep=1)
    drawn = torch.rand(3), np.random.rand(3).tolist(), random.random()
    load_checkpoint(directory, trainer)
    assert torch.equal(torch.rand(3), drawn[0])
    assert (np.random.rand(3).tolist(), random.random()) == drawn[1:]
