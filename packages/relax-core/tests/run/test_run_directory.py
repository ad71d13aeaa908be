import errno
import json
import os
import signal
import subprocess
import sys

import pytest
from relax_core.config import dump_config, load_config
from relax_core.run import RunDirectory, RunDirectoryError, write_atomic
from relax_core.run.lock import RunLock


@pytest.fixture(scope="module")
def config():
    return load_config("quickstart")


def test_a_new_directory_holds_the_resolved_config(tmp_path, config):
    with RunDirectory.create(tmp_path / "a" / "b", config) as directory:
        assert directory.config.read_text() == dump_config(config)
        assert not directory.finished
    assert {entry.name for entry in (tmp_path / "a" / "b").iterdir()} == {
        ".lock", "config.yaml", "tensorboard", "checkpoints",
    }  # fmt: skip


def test_a_directory_in_use_is_refused_within_the_process(tmp_path, config):
    with RunDirectory.create(tmp_path / "run", config), pytest.raises(RunDirectoryError, match="in use"):
        RunDirectory.resume(tmp_path / "run")


HOLDER = """
import sys
from relax_core.run.lock import RunLock
from pathlib import Path
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_in_use_names_the_process_and_a_dead_one_does_not_block(tmp_path, config):
    path = tmp_path / "run"
    RunDirectory.create(path, config).close()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunDirectoryError, match=f"in use by process {holder.pid} on "):
            RunDirectory.resume(path)
        with pytest.raises(RunDirectoryError, match="in use by process"):
            RunDirectory.create(path, config)
        holder.kill()
        holder.wait()
    RunDirectory.resume(path).close()


def test_a_forked_child_that_outlives_the_run_does_not_hold_its_lock(tmp_path):
    code = f"""
import os, time
from pathlib import Path
from relax_core.run.lock import RunLock
lock = RunLock(Path({str(tmp_path)!r}))
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
print(child, flush=True)
os._exit(0)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        parent.wait()
        try:
            RunLock(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_an_unfinished_run_is_not_overwritten_but_resumed(tmp_path, config):
    path = tmp_path / "run"
    RunDirectory.create(path, config).close()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != ".lock"}
    with pytest.raises(RunDirectoryError, match=r"unfinished run: `relax-train --resume .*run`, or choose"):
        RunDirectory.create(path, config)
    assert all(file.read_bytes() == content for file, content in before.items())
    with RunDirectory.resume(path) as directory:
        assert directory.path == path


def test_a_finished_run_is_never_overwritten(tmp_path, config):
    with RunDirectory.create(tmp_path / "run", config) as directory:
        directory.write_json(directory.summary, {"steps": 3})
        assert directory.finished
        assert directory.steps_done() == 3
    with pytest.raises(RunDirectoryError, match="holds a finished run, which is never overwritten"):
        RunDirectory.create(tmp_path / "run", config)


def test_a_folder_with_other_things_is_refused(tmp_path, config):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunDirectoryError, match=r"is not empty and holds no run \(thesis.tex\)"):
        RunDirectory.create(tmp_path, config)


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"holds no run: it has no config\.yaml"):
        RunDirectory.resume(tmp_path)


def test_a_file_in_the_way_is_named(tmp_path, config):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunDirectoryError, match="a file is in the way"):
            RunDirectory.create(path, config)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_permission_is_named(tmp_path, config):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(RunDirectoryError, match=r"Permission denied; choose a place .* with --run.dir"):
            RunDirectory.create(tmp_path / "run", config)
    finally:
        tmp_path.chmod(0o700)


def test_a_read_only_file_system_is_named(config):
    with pytest.raises(RunDirectoryError, match=r"cannot write /proc/"):
        RunDirectory.create("/proc/relax-run", config)


def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    file = tmp_path / "summary.json"
    write_atomic(file, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirectoryError, match=r"the disk is full; free some space"):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_reopened_run_has_its_new_config_and_no_end_mark(tmp_path, config):
    with RunDirectory.create(tmp_path / "run", config) as directory:
        directory.write_json(directory.summary, {"steps": 3})
        longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 99})})
        directory.reopen(longer)
        assert not directory.finished
        assert "steps: 99" in directory.config.read_text()


def test_a_reopened_run_is_rid_of_what_a_killed_process_left(tmp_path, config):
    with RunDirectory.create(tmp_path / "run", config) as directory:
        before = set(directory.path.iterdir())
        (directory.path / ".summary.json.77.tmp").write_text("{")
        (directory.path / ".hf.new-a1").mkdir()
        (directory.path / ".hf.new-a1" / "config.json").write_text("{")
        directory.reopen(config)
        assert set(directory.path.iterdir()) == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"steps": "x"}'])
def test_a_damaged_summary_is_named(tmp_path, config, content):
    with RunDirectory.create(tmp_path / "run", config) as directory:
        directory.summary.write_text(content)
        with pytest.raises(RunDirectoryError, match=r"summary.json cannot be read"):
            directory.steps_done()


def test_json_is_standard_even_for_numbers_that_are_not(tmp_path, config):
    with RunDirectory.create(tmp_path / "run", config) as directory:
        directory.write_json(directory.summary, {"a": float("nan"), "b": [float("-inf")], "c": 1.5})
        assert json.loads(directory.summary.read_text()) == {"a": "NaN", "b": ["-Infinity"], "c": 1.5}
