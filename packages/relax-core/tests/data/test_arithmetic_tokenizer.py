import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.data import DataConfig, load_prompts, load_samples, load_tokenizer
from relax_core.data.arithmetic import generate, write_arithmetic
from relax_core.data.arithmetic_tokenizer import arithmetic_vocabulary, write_arithmetic_tokenizer
from relax_rollout.rewards import RewardInput, RewardRunner, load_reward


def _pieces(tokenizer, text):
    return [tokenizer.decode([number]) for number in tokenizer(text, add_special_tokens=False)["input_ids"]]


def test_digits_stand_alone_and_words_take_the_space_before_them(tokenizer):
    assert _pieces(tokenizer, "forty two plus 17") == ["forty", " two", " plus ", "1", "7"]
    assert _pieces(tokenizer, "305 - seventeen") == ["3", "0", "5", " - ", "seventeen"]
    assert _pieces(tokenizer, "six + sixty six") == ["six", " + ", "sixty", " six"]


@settings(deadline=None)
@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"), max_size=60))
def test_ascii_text_comes_back_as_it_was(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_the_vocabulary_is_small_and_without_gaps(tokenizer):
    vocabulary = arithmetic_vocabulary()
    assert len(vocabulary) == len(set(vocabulary)) == len(tokenizer) == 165
    assert tokenizer.convert_ids_to_tokens(list(range(165))) == vocabulary


def test_special_tokens_have_their_roles(tokenizer):
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        "<|im_end|>",
        "<|endoftext|>",
        "<|unknown|>",
    )
    text = "<|im_start|>user\n1<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == "user\n1"
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_text"])
def test_it_opens_beside_a_model_config(tmp_path, tokenizer, model_type):
    write_arithmetic_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    beside = load_tokenizer(tmp_path)
    text = "<|im_start|>user\nforty two plus 17<|im_end|>"
    assert beside(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert beside.chat_template == tokenizer.chat_template


def test_it_is_written_as_the_same_bytes_each_time(tmp_path, tokenizer_folder):
    write_arithmetic_tokenizer(tmp_path / "again")
    written = {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert written == {file.name: file.read_bytes() for file in tokenizer_folder.iterdir()}
    assert sum(map(len, written.values())) < 16_000


def test_the_tasks_prompts_and_completions_are_short(tokenizer, tmp_path):
    train, held_out = write_arithmetic(tmp_path, 0, train_rows=3000, held_out_rows=200)
    prompts = load_prompts(DataConfig(path=str(train), eval_path=str(held_out)), tokenizer, seed=0)
    lengths = {len(prompt.ids) for prompt in (*prompts.train, *prompts.held_out)}
    assert lengths <= set(range(10, 17))
    samples = load_samples(DataConfig(path=str(train), completion_key="answer"), tokenizer, seed=0).train
    assert {int(sample.loss_mask.sum()) for sample in samples} == {2, 3, 4}


def test_the_maths_reward_accepts_every_answer_and_no_other():
    train, held_out = generate(0, train_rows=20, held_out_rows=20)
    inputs = [
        RewardInput(row["prompt"], completion, row["answer"], {})
        for row in (*train, *held_out)
        for completion in (row["answer"], str(int(row["answer"]) + 1))
    ]
    with RewardRunner(load_reward("math"), timeout_s=30.0, concurrency=1) as runner:
        results = asyncio.run(runner.score(inputs))
    assert [result.score for result in results] == [1.0, 0.0] * 40
    assert not any(result.error for result in results)
