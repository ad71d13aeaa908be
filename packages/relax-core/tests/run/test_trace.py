"""The timeline against the trace event format, read back as Perfetto reads it."""

import json
import threading
from pathlib import Path

import pytest
from relax_core.config import load_config
from relax_core.loop import run
from relax_core.model import Qwen35Config
from relax_core.model.cost import sample_cost
from relax_core.run import Recorder, RunDirectory
from relax_core.run.trace import (
    ProcessSpans,
    Trace,
    draw_others,
    in_lanes,
    keeping_spans,
    span,
    tracing,
)

FIELDS = {
    "X": {"name": str, "ts": (int, float), "dur": (int, float), "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}
"""What the format asks of the two kinds of events in use."""


def read(path):
    """{row: [(name, begin, end, arguments)]} in seconds, after a check of every event.

    Rows of other processes than the first are called (process, row).
    """
    events = json.loads(path.read_text(encoding="utf-8"))
    assert events[-1]["name"] == "end"
    named = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    processes = dict(named)
    assert [pid for pid, _ in named] == [*range(1, len(named) + 1)]
    rows = {}
    for event in events:
        for name, kind in FIELDS[event["ph"]].items():
            assert isinstance(event[name], kind), event
        if event["name"] == "thread_name":
            assert event["tid"] not in rows
            row = event["args"]["name"]
            own = event["pid"] == 1
            rows[event["tid"]] = (row if own else (processes[event["pid"]], row), [])
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            spans = rows[event["tid"]][1]
            spans.append(
                (event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["args"])
            )
    for name, spans in rows.values():
        refuse_overlap(name, spans)
    return dict(rows.values())


def refuse_overlap(row, spans):
    """Spans of a row must nest; times are rounded to nanoseconds."""
    for a in spans:
        for b in spans:
            crossed = a[1] + 1e-8 < b[1] < a[2] - 1e-8 and b[2] > a[2] + 1e-8  # begins inside, ends outside
            assert not crossed, f"{a} and {b} cross in {row}"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_phases_and_steps_lie_where_the_clock_says(tmp_path):
    config = load_config(
        "quickstart", ["--run.steps=2", "--trainer.warmup_steps=0", "--run.trace=true", "--run.progress=none"]
    )
    clock = Clock()
    with RunDirectory.create(tmp_path / "run", config) as directory:
        with Recorder(directory, config, clock=clock, age=0.0) as recorder:
            with recorder.phase("eval"):
                clock.now += 1
                with recorder.phase("rollout"):
                    clock.now += 2
            with recorder.phase("train"):
                clock.now += 4
            recorder.step(1, {"loss": 0.5})
        rows = read(directory.trace(None))
    assert rows["phases"] == [("rollout", 1.0, 3.0, {}), ("eval", 0.0, 3.0, {}), ("train", 3.0, 7.0, {})]
    assert rows["steps"] == [("step 1", 0.0, 7.0, {"loss": 0.5})]


def test_what_fails_is_drawn_too(tmp_path):
    def fail():
        with span("load", "weight update", bytes=3) as shown:
            shown["late"] = True
            raise KeyError

    with tracing(Trace(tmp_path / "trace.json", process="run")), pytest.raises(KeyError):
        fail()
    (found,) = read(tmp_path / "trace.json")["weight update"]
    assert (found[0], found[3]) == ("load", {"bytes": 3, "late": True})


def test_what_goes_on_at_once_is_drawn_in_rows_of_its_own(tmp_path):
    clock = Clock()
    with tracing(Trace(tmp_path / "trace.json", process="run", clock=clock)):
        first = span("a", "reward")
        first.__enter__()
        clock.now += 1
        with span("b", "reward"):
            clock.now += 1
            first.__exit__(None, None, None)
            clock.now += 1
        with span("c", "reward"):
            clock.now += 1
    rows = read(tmp_path / "trace.json")
    assert {row: [each[:3] for each in spans] for row, spans in rows.items()} == {
        "reward": [("a", 0.0, 2.0), ("c", 3.0, 4.0)],
        "reward 2": [("b", 1.0, 3.0)],
    }
    with span("nothing", "reward"):
        pass


def test_what_other_processes_did_is_drawn_by_this_clock(tmp_path):
    clock = Clock()
    trace = Trace(tmp_path / "trace.json", process="run", clock=clock)
    # A clock 900 s ahead: 1011 in the middle between question and answer at 110 and 112.
    far = lambda now, *spans: [ProcessSpans("rank 1", now, spans)]  # noqa: E731
    trace.others(far(1011.0, ("step", "trainer", 1005.0, 1008.0, {"tokens": 3})), 110.0, 112.0)
    # A quicker answer tells more, whatever a slower one says later.
    trace.others(far(1020.3, ("step", "trainer", 1015.0, 1016.0, {})), 120.0, 120.2)
    trace.others(far(1035.0, ("step", "trainer", 1030.0, 1031.0, {})), 130.0, 134.0)
    # Between question and answer: as good as the same clock.
    trace.others([ProcessSpans("rank 0", 110.5, [("step", "trainer", 99.0, 101.0, {})])], 110.0, 112.0)
    trace.close()
    rows = read(tmp_path / "trace.json")
    found = {row: [(round(a, 6), round(b, 6)) for _, a, b, _ in spans] for row, spans in rows.items()}
    assert found == {
        ("rank 1", "trainer"): [(5.0, 8.0), (14.8, 15.8), (29.8, 30.8)],
        # What began before the trace did is drawn from its zero.
        ("rank 0", "trainer"): [(0.0, 1.0)],
    }
    assert rows["rank 1", "trainer"][0][3] == {"tokens": 3}


def test_a_process_keeps_its_spans_until_it_is_asked():
    with keeping_spans("rank 1") as log:
        with span("step", "trainer", samples=2) as shown:
            shown["tokens"] = 7
        first = log.take()
        assert (first.process, [(s[0], s[1], s[4]) for s in first.spans]) == (
            "rank 1",
            [("step", "trainer", {"samples": 2, "tokens": 7})],
        )
        assert first.spans[0][2] <= first.spans[0][3] <= first.now
        assert log.take().spans == []
        # Only the process that writes the file draws others.
        draw_others([first], 0.0, 1.0)
        assert log.take().spans == []


def test_spans_that_cross_are_put_into_lanes():
    spans = [("b", "reward", 1.0, 3.0, {}), ("a", "reward", 0.0, 2.0, {}), ("c", "reward", 2.0, 4.0, {})]
    assert [(name, row) for name, row, *_ in in_lanes(spans)] == [
        ("a", "reward"), ("b", "reward 2"), ("c", "reward"),
    ]  # fmt: skip


def test_threads_write_whole_events(tmp_path):
    def work():
        for _ in range(50):
            with span("x", "reward"):
                pass

    with tracing(Trace(tmp_path / "trace.json", process="run")):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(map(len, read(tmp_path / "trace.json").values())) == 200


def test_a_killed_run_leaves_all_finished_steps(tmp_path):
    trace = Trace(tmp_path / "trace.json", process='run \u00e9 "quoted"')
    trace.complete("step 1", "steps", 0, 1)
    trace.flush()
    text = (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert [event["name"] for event in json.loads(text.rstrip(",\n") + "]")][-1] == "step 1"
    trace.close()
    trace.close()


def test_a_run_shows_phases_rewards_and_weight_updates(small_run, tmp_path):
    config = small_run(run={"steps": 2, "trace": True}, eval={"before": False, "after": False})
    with RunDirectory.create(tmp_path / "run", config) as directory:
        assert run(config, directory, resume=False) == "finished"
        rows = read(directory.trace(None))
        lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [name for name, *_ in rows["steps"]] == ["step 1", "step 2"]
    for line, (_, begin, end, _) in zip(lines, rows["steps"], strict=True):
        inside = [each for each in rows["phases"] if begin <= each[1] < end]
        assert {"rollout", "reward", "train", "update"} <= {name for name, *_ in inside}
        # The timer's figure and the span are taken one after the other.
        (train,) = (last - first for name, first, last, _ in inside if name == "train")
        assert train == pytest.approx(line["time"]["phases"]["train"], abs=0.05)
        (update,) = (each for each in inside if each[0] == "update")
        sent = [each for each in rows["weight update"] if update[1] <= each[1] and each[2] <= update[2]]
        assert [name for name, *_ in sent] == ["begin", "load", "end"]
        assert sent[1][3]["bytes"] > 0
        cost = sample_cost(
            Qwen35Config.from_hf(json.loads((Path(config.model.path) / "config.json").read_text()))
        )
        assert cost.linear <= line["train_flops"] / line["train_tokens"] / 6 <= cost(64) / 64
    assert [name for name, *_ in rows["trainer"]][:2] == ["train policy", "train policy"]
    workers = {row: spans for row, spans in rows.items() if isinstance(row, tuple)}
    assert all(process.startswith("reward worker ") for process, _ in workers)
    judged = [each for spans in workers.values() for each in spans]
    # A call that is late on a slow machine has no times.
    assert 0 < len(judged) <= 2 * 16
    for _, begin, end, shown in judged:
        # Wall clocks are read to within a millisecond or so of one another.
        assert any(a - 0.05 <= begin <= end <= b + 0.05 for _, a, b, _ in rows["reward"])
        assert shown["score"] >= 0
    assert sum(shown["completions"] for _, _, _, shown in rows["reward"]) == 2 * 16
    assert all(shown["longest_s"] <= shown["worker_seconds"] for _, _, _, shown in rows["reward"])
