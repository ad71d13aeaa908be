"""Rows prepared in worker processes: the same examples, failures with names, and nobody left behind."""

import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from relax_core.data import DataConfig, load_samples
from relax_core.data import load as loading
from relax_core.data.prepare import preparation
from relax_core.data.rows import Row
from relax_core.data.workers import WorkerError

# Long enough for a machine that is busy with other tests.
_PATIENCE = 120


HERE = str(Path(__file__).parent)


@pytest.fixture
def recording(monkeypatch):
    """The builder, which workers can import too."""
    monkeypatch.setenv("PYTHONPATH", HERE, prepend=os.pathsep)
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("recording_builder").Recording()


def chunks(*deeds):
    """Chunks of one row each."""
    return [[Row(f"rows:{n}", {"do": deed})] for n, deed in enumerate(deeds, start=1)]


def _ended(pids):
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_examples_bad_rows_and_counts_are_those_without_workers(
    tokenizer, write_rows, monkeypatch, caplog, tmp_path
):
    monkeypatch.setattr(loading, "_CHUNK_ROWS", 8)
    rows = [{"prompt": f"{n} plus {n}", "completion": str(2 * n), "answer": str(2 * n)} for n in range(60)]
    rows[21] = {"prompt": 7}
    rows[30]["prompt"] = "1 plus 2 plus 3 plus 4 plus 5 plus 6"
    path = write_rows(*rows)
    other = write_rows(*rows[40:], name="other.jsonl")
    cfg = DataConfig(
        path=path,
        mixture={other: 2.0},
        eval_fraction=0.1,
        max_bad_rows=1,
        max_tokens=16,
        overlong="skip",
    )
    caplog.set_level(logging.WARNING)
    plain = load_samples(cfg, tokenizer, seed=0)
    said = [record.getMessage() for record in caplog.records]
    assert any("1 examples above data.max_tokens left out" in line for line in said)
    caplog.clear()
    spread = load_samples(cfg.model_copy(update={"workers": 2}), tokenizer, seed=0)
    assert [record.getMessage() for record in caplog.records] == said
    for one, same in ((plain.train, spread.train), (plain.held_out, spread.held_out)):
        assert [(s.id, s.ids.tolist(), s.loss_mask.tolist(), s.prompt_text) for s in one] == [
            (s.id, s.ids.tolist(), s.loss_mask.tolist(), s.prompt_text) for s in same
        ]
    assert spread.bad_rows == plain.bad_rows
    assert spread.stream().state_dict() == plain.stream().state_dict()


def test_chunks_are_shared_out_and_come_back_in_order_and_nobody_is_left(recording):
    deeds = [str(n) for n in range(5)]
    with preparation(recording, 2) as prepare:
        made = [example for one in prepare(chunks(*deeds)) for example in one.examples]
        # The same workers, for a further source.
        again = [example for one in prepare(chunks("a")) for example in one.examples]
    assert [what for what, _ in made] == deeds
    pids = {pid for _, pid in made}
    assert len(pids) == 2
    assert {pid for _, pid in again} < pids
    assert os.getpid() not in pids
    assert _ended(pids)


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("kill", r"data worker 2 \(process \d+\) ended by SIGKILL; .*, on rows rows:2 to rows:2: lower"),
        ("fail", "data worker 2 failed on rows rows:2 to rows:2: KeyError: 'no such thing'"),
    ],
)
def test_a_worker_that_fails_or_is_ended_is_named_with_its_rows(recording, deed, words):
    pids = []

    def prepare_all():
        with preparation(recording, 2) as prepare:
            for one in prepare(chunks("first", deed, "third")):
                pids.extend(pid for _, pid in one.examples)

    with pytest.raises(WorkerError, match=words):
        prepare_all()
    assert len(pids) == 1
    assert _ended(pids)


def test_workers_end_with_a_run_that_is_killed():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import relax_core.data.workers as w\n"
        "with w.Workers(None, 1) as workers:\n"
        "    print(workers._workers[0]._process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, HERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        worker = psutil.Process(int(run.stdout.readline()))
    finally:
        run.kill()
        run.communicate()
    assert not psutil.wait_procs([worker], timeout=_PATIENCE)[1]
