import json

import pytest
from relax_core.run import JsonlWriter, Masker, RunDirectoryError, read_jsonl

MASK = Masker({})


def write(path, *records, keep_to_step=None):
    writer = JsonlWriter(path, MASK, keep_to_step=keep_to_step)
    for record in records:
        writer.write(record)
    writer.close()


def test_each_line_is_on_disk_at_once(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl", MASK)
    writer.write({"step": 1, "text": "ü\n"})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "text": "ü\n"}]
    writer.sync()
    writer.close()


def test_resuming_cuts_later_steps_and_a_half_written_line(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, *({"step": step, "x": step * 0.1} for step in range(1, 6)))
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:3])
    with path.open("ab") as file:
        file.write(b'{"step": 6, "x"')
    write(path, {"step": 4, "x": -1}, keep_to_step=3)
    assert path.read_bytes() == kept + b'{"step": 4, "x": -1}\n'


def test_resuming_without_a_file_begins_one(tmp_path):
    write(tmp_path / "m.jsonl", {"step": 1}, keep_to_step=0)
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1}]


def test_a_new_run_refuses_old_lines(tmp_path):
    write(tmp_path / "m.jsonl", {"step": 1})
    with pytest.raises(RunDirectoryError, match="has lines already"):
        JsonlWriter(tmp_path / "m.jsonl", MASK)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"step": 1}\n{"step"\n{"step": 3}\n', "line 2: no JSON"),
        (b'{"step": 1}\n\n', "line 2: no JSON"),
        (b"[1]\n", "line 1: no JSON object but list"),
        (b"\xff\xfe\n", "line 1: no JSON"),
    ],
)
def test_damage_before_the_end_is_named(tmp_path, content, words):
    (tmp_path / "m.jsonl").write_bytes(content)
    with pytest.raises(RunDirectoryError, match=words):
        read_jsonl(tmp_path / "m.jsonl")
    with pytest.raises(RunDirectoryError, match=words):
        JsonlWriter(tmp_path / "m.jsonl", MASK, keep_to_step=1)
    assert (tmp_path / "m.jsonl").read_bytes() == content


def test_a_cut_last_line_is_dropped_or_refused(tmp_path):
    (tmp_path / "m.jsonl").write_bytes(b'{"step": 1}\n{"st')
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1}]
    with pytest.raises(RunDirectoryError, match="line 2: the line is cut"):
        read_jsonl(tmp_path / "m.jsonl", allow_cut_end=False)


def test_a_missing_file_has_no_lines(tmp_path):
    assert read_jsonl(tmp_path / "none") == []


def test_a_full_disk_is_a_clear_error(tmp_path):
    path = tmp_path / "m.jsonl"
    path.symlink_to("/dev/full")
    writer = JsonlWriter(path, MASK)
    with pytest.raises(RunDirectoryError, match=r"cannot write .*m.jsonl: the disk is full; free some space"):
        writer.write({"step": 1})
    writer.close()


def test_lines_are_standard_json(tmp_path):
    write(tmp_path / "m.jsonl", {"step": 1, "loss": float("nan"), "gap": float("inf")})
    line = (tmp_path / "m.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": "NaN", "gap": "Infinity"}


@pytest.mark.parametrize("line", ['{"reward": 1}', '{"step": "x"}', '{"step": null}'])
def test_a_line_without_its_step_is_named_and_nothing_is_cut(tmp_path, line):
    file = tmp_path / "m.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(RunDirectoryError, match=r"m\.jsonl, line 2: no step"):
        JsonlWriter(file, MASK, keep_to_step=0)
    assert file.read_text() == f'{{"step": 1}}\n{line}\n'
