import sys
import types

import pytest
from relax_core.data.problems import DataError
from relax_core.data.sources import find_files, read_rows

HUB = {"subset": None, "split": "train", "revision": None}


def _fake_datasets(monkeypatch, load_dataset):
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_file_a_folder_and_a_pattern_name_their_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.parquet", "c.jsonl", "notes.txt"):
        (tmp_path / name).write_text("")
    folder = str(tmp_path)
    assert find_files(f"{folder}/b.jsonl") == [(f"{folder}/b.jsonl", tmp_path / "b.jsonl")]
    inside = [(f"{folder}/{name}", tmp_path / name) for name in ("a.parquet", "b.jsonl", "c.jsonl")]
    assert find_files(folder) == inside
    assert find_files(folder + "/") == inside
    assert [file.name for _, file in find_files(f"{folder}/*.jsonl")] == ["b.jsonl", "c.jsonl"]


def test_rows_of_several_files_follow_one_another_under_their_own_places(tmp_path, write_rows):
    write_rows({"n": 2}, name="b.jsonl")
    write_rows({"n": 0}, {"n": 1}, name="a.jsonl")
    rows = list(read_rows(f"{tmp_path}/?.jsonl", {"n"}, **HUB))
    assert [row.fields["n"] for row in rows] == [0, 1, 2]
    assert [row.place.removeprefix(f"{tmp_path}/") for row in rows] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.jsonl", "there is no file or folder missing.jsonl"),
        ("some/deep/folder", "there is no file or folder some/deep/folder"),
        ("./owner/name", "there is no file or folder"),
        ("nothing*.jsonl", r"no file matches the pattern nothing\*.jsonl"),
        ("builtin:no/such.jsonl", "builtin:no/such.jsonl does not ship with relax-core"),
    ],
)
def test_what_is_not_there_is_said_to_be_missing(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        find_files(path)


def test_other_kinds_of_files_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"ends in \.jsonl or \.parquet, not in '\.csv'"):
        find_files(f"{tmp_path}/rows.csv")
    with pytest.raises(DataError, match=r"holds no file that ends in \.jsonl or \.parquet"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("name", ["openai/gsm8k", "gsm8k"])
def test_a_hub_name_without_the_library_says_what_to_install(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=rf"'{name}' is no file .* pip install datasets"):
        list(read_rows(name, {"prompt"}, **HUB))


def test_a_hub_data_set_is_loaded_as_asked(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return [{"question": "a"}, {"question": "b"}]

    _fake_datasets(monkeypatch, load_dataset)
    rows = list(read_rows("openai/gsm8k", set(), subset="main", split="test", revision="v1"))
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "revision": "v1"})]
    assert [(row.place, row.fields) for row in rows] == [
        ("openai/gsm8k/test:1", {"question": "a"}),
        ("openai/gsm8k/test:2", {"question": "b"}),
    ]


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("Unknown split 'train'")])
def test_a_hub_data_set_that_cannot_be_had_says_what_to_do(monkeypatch, error):
    def load_dataset(*args, **kwargs):
        raise error

    _fake_datasets(monkeypatch, load_dataset)
    with pytest.raises(DataError, match=rf"(?s){error}.*data.hub_split.*without network"):
        list(read_rows("openai/gsm8k", set(), **HUB))
