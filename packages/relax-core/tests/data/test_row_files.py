import json

import pyarrow
import pyarrow.parquet
import pytest
from relax_core.data.jsonl import read_jsonl
from relax_core.data.parquet import read_parquet
from relax_core.data.problems import BadRow, DataError
from relax_core.data.rows import Row


def test_jsonl_names_every_bad_line_and_goes_on(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = [
        b'\xef\xbb\xbf{"prompt": "one"}',
        b"",
        b'{"prompt": ',
        b"[1, 2]",
        b'{"prompt": "\xff"}',
        b'{"answer": NaN}',
        b"null",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"answer": ' + b"9" * 5000 + b"}",
        '{"prompt": "zwölf"}'.encode(),
    ]
    file.write_bytes(b"\r\n".join(lines))
    rows = list(read_jsonl(file, "r"))
    assert rows[0] == Row("r:1", {"prompt": "one"})
    assert rows[-1] == Row("r:10", {"prompt": "zwölf"})
    reasons = {row.place: row.reason for row in rows if isinstance(row, BadRow)}
    assert reasons["r:3"].startswith("not JSON: Expecting value")
    assert reasons["r:4"] == "a row must be an object, not a list"
    assert reasons["r:5"] == "not UTF-8 at byte 12"
    assert reasons["r:6"] == "not JSON: NaN is no JSON number"
    assert reasons["r:7"] == "a row must be an object, not null"
    assert reasons["r:8"] == "nested too deeply to read"
    assert reasons["r:9"].startswith("not JSON: Exceeds the limit")
    assert len(rows) == 9


def test_parquet_gives_the_rows_of_the_wanted_columns_in_order(tmp_path):
    file = tmp_path / "rows.parquet"
    messages = [[{"role": "user", "content": str(n)}] for n in range(2500)]
    table = pyarrow.table({"messages": messages, "answer": list(range(2500)), "noise": ["x"] * 2500})
    pyarrow.parquet.write_table(table, file, row_group_size=700)
    rows = list(read_parquet(file, "p", {"messages", "answer", "metadata"}))
    assert len(rows) == 2500
    assert rows[2499] == Row("p:2500", {"messages": [{"role": "user", "content": "2499"}], "answer": 2499})


def test_parquet_without_a_wanted_column_lists_what_there_is(tmp_path):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"], "reply": ["b"]}), file)
    with pytest.raises(
        DataError, match="none of the columns answer, prompt is there; it has question, reply"
    ):
        list(read_parquet(file, "p", {"prompt", "answer"}))


@pytest.mark.parametrize("content", [b"", b"PAR1 no parquet at all PAR1", json.dumps({"a": 1}).encode()])
def test_a_file_that_is_no_parquet_is_refused_by_name(tmp_path, content):
    file = tmp_path / "rows.parquet"
    file.write_bytes(content)
    with pytest.raises(DataError, match="p cannot be read as Parquet"):
        list(read_parquet(file, "p", {"prompt"}))


def test_a_parquet_file_cut_in_half_or_altered_is_refused_by_name(tmp_path):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [str(n) for n in range(1000)]}), file)
    whole = file.read_bytes()
    damaged = bytes([*whole[:60], *(255 - byte for byte in whole[60:90]), *whole[90:]])
    for content in (whole[:-200], whole[: len(whole) // 2] + whole[-8:], damaged):
        file.write_bytes(content)
        _refuses(file)


def _refuses(file):
    with pytest.raises(DataError, match="p cannot be read as Parquet"):
        list(read_parquet(file, "p", {"prompt"}))


def test_text_that_is_not_utf8_is_a_bad_row_of_its_own(tmp_path):
    """Parquet does not check what a writer calls text."""
    data = pyarrow.array([b"one", b"\xff\xfe", b"three"])
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, data.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), tmp_path / "rows.parquet")
    one, bad, three = read_parquet(tmp_path / "rows.parquet", "p", {"prompt"})
    assert (one.fields, three.fields) == ({"prompt": "one"}, {"prompt": "three"})
    assert isinstance(bad, BadRow)
    assert str(bad).startswith("p:2: text that is not UTF-8: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    # Reading a process's memory from its beginning fails, for root too.
    (tmp_path / "rows.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match="r cannot be read: Input/output error"):
        list(read_jsonl(tmp_path / "rows.jsonl", "r"))
