"""The relax-rollout command, as a user runs it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from relax_rollout.cli.main import main
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def model(models, tmp_path_factory) -> Path:
    """A model with a word-level tokenizer beside it: token n is the word "wn"."""
    directory = tmp_path_factory.mktemp("cli") / "model"
    shutil.copytree(models.get(), directory)
    words = {f"w{n}": n for n in range(39)} | {"<eos>": 39}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(directory)
    return directory


def lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def generate(model, *more: str) -> int:
    return main(["generate", "--model", str(model), "--prompt", "w1 w2", *more])


def test_generate_prints_a_line_per_completion(model, capsys):
    assert generate(model, "--prompt", "w3", "--n", "3", "--max-new-tokens", "5") == 0
    printed = lines(capsys)
    assert [(line["prompt"], line["sample"]) for line in printed] == [
        (prompt, sample) for prompt in ("w1 w2", "w3") for sample in range(3)
    ]
    for line in printed:
        words = line["completion"].split()
        assert set(words) <= {f"w{n}" for n in range(39)}
        assert len(words) == line["tokens"] - (line["finish_reason"] == "stop")
        assert line["logprob"] < 0
    assert len({line["completion"] for line in printed[:3]}) > 1


def test_generate_repeats_with_its_seed(model, capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        generate(model, "--seed", seed)
        outputs.append(lines(capsys))
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--n", "0"), "--n is 0; it must be at least 1"),
        (("--max-new-tokens", "600"), "the model's context is 512"),
        (("--chat",), "the tokenizer has no chat template"),
        (("--prompt", " "), "an empty prompt"),
        (("--dtype", "int4"), "dtype is 'int4'"),
    ],
)
def test_generate_says_what_is_wrong(model, capsys, more, words):
    assert generate(model, *more) == 2
    assert words in capsys.readouterr().err


def test_score_prints_a_line_per_completion(capsys):
    assert main(["score", "--answer", "7", "--completion", "so 7", "--completion", "8"]) == 0
    printed = lines(capsys)
    assert [line["correct"] for line in printed] == [True, False]
    assert printed[0]["extracted"] == "7"


def test_score_runs_a_function_of_the_current_directory(tmp_path):
    (tmp_path / "mine.py").write_text("def length(item):\n    return len(item.completion)\n")
    command = [sys.executable, "-m", "relax_rollout.cli.main", "score", "--reward", "mine:length"]
    done = subprocess.run(
        [*command, "--completion", "abc"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["score"] == 3.0


def test_score_says_what_is_wrong(capsys):
    assert main(["score", "--reward", "maths", "--completion", "x"]) == 2
    assert "no reward is called 'maths'" in capsys.readouterr().err


def test_version_and_help(capsys):
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert ended.value.code == 0
    assert "relax-rollout 0." in capsys.readouterr().out
