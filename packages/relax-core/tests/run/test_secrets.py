import json
import logging

import pytest
from relax_core.config import load_config
from relax_core.run import JsonlWriter, Masker, MaskingFormatter, RunDirectory, logging_to, read_jsonl
from rich.console import Console

KEY = 'wb-"geheim"-0123'


def test_values_of_key_like_variables_are_masked():
    mask = Masker(
        {
            "WANDB_API_KEY": "0123456789",
            "HF_TOKEN": "hf_abcdef",
            "my_secret": "s3cr3t-value",
            "DB_PASSWORD": "hunter22",
            "KEYBOARD": "qwertz-layout",
            "TOKENIZERS_PARALLELISM": "false-value",
            "SHORT_KEY": "1234",
        }
    )
    assert mask("a 0123456789 b hf_abcdef c s3cr3t-value d hunter22") == "a *** b *** c *** d ***"
    assert mask("qwertz-layout false-value 1234") == "qwertz-layout false-value 1234"


def test_the_longer_of_two_secrets_is_masked_whole():
    assert Masker({"A_KEY": "abcdef", "B_KEY": "abcdefghi"})("abcdefghi abcdef") == "*** ***"


def test_no_secrets_leave_everything_as_it_is():
    mask = Masker({})
    assert mask("text") == "text"
    assert mask.tree({"a": ["b", 1]}) == {"a": ["b", 1]}


def test_numbers_stay_numbers():
    mask = Masker({"A_KEY": "100000"})
    assert mask.tree({"n": 100000, "t": "is 100000", "l": ("100000", None)}) == {
        "n": 100000,
        "t": "is ***",
        "l": ["***", None],
    }


def test_the_log_line_is_masked_with_its_arguments_and_traceback():
    formatter = MaskingFormatter(Masker({"A_KEY": KEY}), "%(message)s")
    try:
        raise ValueError(f"bad {KEY}")
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "f", 1, "got %s", (KEY,), (type(error), error, error.__traceback__)
        )
    text = formatter.format(record)
    assert "geheim" not in text
    assert text.startswith("got ***")
    assert "ValueError: bad ***" in text


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("RELAX_TEST_API_KEY", KEY)


def test_no_file_of_a_run_holds_a_secret(tmp_path, secret):
    config = load_config("quickstart", ["--data.path", f"/data/{KEY}/rows.jsonl"])
    with RunDirectory.create(tmp_path / "run", config) as directory:
        console = Console(file=(tmp_path / "terminal").open("w"))
        with logging_to(directory.log, directory.mask, console, level="debug"):
            logging.getLogger("relax_core.x").warning("the key is %s", KEY)
            logging.getLogger("relax_core.x").debug("in JSON: %s", json.dumps({"key": KEY}))
        directory.write_json(directory.summary, {"note": KEY})
        writer = JsonlWriter(directory.samples, directory.mask)
        writer.write({"step": 1, "completion": f"it is {KEY}"})
        writer.close()
        console.file.close()
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or "geheim" not in file.read_text(), file
    assert read_jsonl(directory.samples) == [{"step": 1, "completion": "it is ***"}]
    assert "the key is ***" in (tmp_path / "terminal").read_text()
