import logging
from pathlib import Path

import pytest
from relax_core.cli.report import draw
from relax_core.report import ReportError, read_run
from relax_core.report.read import unique_labels


def test_a_run_is_read_whole(make_run):
    run = read_run(make_run("first"))
    assert run.label == "first"
    assert [record["step"] for record in run.metrics] == list(range(21))
    assert len(run.samples) == 40
    assert run.summary["eval_after"] == 0.75
    assert run.config["run"]["steps"] == 20


def test_a_run_that_is_still_running_needs_metrics_only(make_run):
    folder = make_run("first")
    for name in ("summary.json", "samples.jsonl", "config.yaml"):
        (folder / name).unlink()
    run = read_run(folder)
    assert (run.samples, run.summary, run.config) == ([], {}, {})


def test_a_cut_last_line_is_left_out_and_said_so(make_run, caplog):
    folder = make_run("first")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "rew')
    with caplog.at_level(logging.WARNING):
        run = read_run(folder)
    assert run.metrics[-1]["step"] == 20
    assert "metrics.jsonl: the last line is cut and left out" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", b'{"step": 1, "a": ' + b"[" * 100_000 + b"\n", "maximum recursion depth"),
        ("summary.json", b"[" * 100_000, "maximum recursion depth"),
        ("metrics.jsonl", b"", "has no finished step yet"),
        ("metrics.jsonl", b'{"step": 1', "has no finished step yet"),
        ("metrics.jsonl", b'{"step": 1}\n{"step\n', "damaged: .*metrics.jsonl, line 2: no JSON"),
        ("metrics.jsonl", b'{"step": 1}\n{"reward": 1}\n', "metrics.jsonl, line 2: `step` is missing"),
        ("metrics.jsonl", b'{"step": "1"}\n', "line 1: `step` is missing or no integer"),
        ("samples.jsonl", b"\xff\n", "damaged: .*samples.jsonl, line 1"),
        ("summary.json", b"{", "summary.json is damaged"),
        ("summary.json", b"[]", "summary.json is damaged: it holds no JSON object"),
        ("config.yaml", b"run: [", "config.yaml is damaged: line 1"),
    ],
)
def test_damage_is_named_by_file_and_line(make_run, name, content, words):
    folder = make_run("first")
    (folder / name).write_bytes(content)
    with pytest.raises(ReportError, match=words):
        read_run(folder)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ReportError, match="is no folder"):
        read_run(tmp_path / "none")
    with pytest.raises(ReportError, match=r"has no metrics.jsonl: it is no run directory"):
        read_run(tmp_path)


def test_labels_are_as_short_as_they_can_be():
    assert unique_labels([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert unique_labels([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    with pytest.raises(ReportError, match="given twice"):
        unique_labels([Path("/x/a"), Path("/x/../x/a")])


def test_whatever_values_a_run_holds_its_page_is_written(make_run):
    folder = make_run("zwölf 漢字")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 21, "reward": {"a": [1]}, "\\ud800": "\\ud800", "big": 1e400}\n')
    (folder / "config.yaml").write_text("run: {t: !!set {a, b}, day: 2024-01-01, no: .nan}\n")
    page = draw([folder]).read_text(encoding="utf-8")
    assert "\\ud800" in page
    assert "2024-01-01" in page
