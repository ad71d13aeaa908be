import numpy as np
import pytest
from relax_core.data import DataConfig, DataError, load_prompts


def _load(path, tokenizer, **changes):
    return load_prompts(DataConfig(path=path, **changes), tokenizer, seed=0).train


def test_a_prompt_opens_the_assistants_turn_as_transformers_does(tokenizer, write_rows):
    messages = [{"role": "user", "content": "forty two plus 17"}]
    path = write_rows({"prompt": "forty two plus 17", "answer": 59, "level": 2})
    (prompt,) = _load(path, tokenizer, metadata_keys=("level",))
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert prompt.prompt_ids == tuple(theirs["input_ids"])
    assert prompt.prompt_text == "<|im_start|>user\nforty two plus 17<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.messages == tuple(messages)
    assert (prompt.answer, prompt.metadata, prompt.id) == ("59", {"level": 2}, f"{path}:1")
    assert prompt.ids.dtype == np.int32


def test_plain_prompts_are_taken_as_they_are(tokenizer, write_rows):
    (prompt,) = _load(write_rows({"prompt": "1 + 1"}), tokenizer, chat=False, answer_key=None)
    assert tokenizer.decode(prompt.ids) == prompt.prompt_text == "1 + 1"
    assert (prompt.messages, prompt.answer) == (None, None)


def test_a_conversation_must_leave_the_model_something_to_say(tokenizer, write_rows):
    path = write_rows({"messages": [{"role": "assistant", "content": "x"}], "answer": "1"})
    with pytest.raises(DataError, match="ends with an assistant message: the model has nothing to answer"):
        _load(path, tokenizer)


def test_an_empty_plain_prompt_is_a_bad_row(tokenizer, write_rows):
    with pytest.raises(DataError, match=r"rows.jsonl:1: the prompt is empty"):
        _load(write_rows({"prompt": "", "answer": "1"}), tokenizer, chat=False)


@pytest.mark.parametrize("kind", ["refuse", "skip", "truncate"])
def test_prompts_above_the_limit(tokenizer, write_rows, kind):
    rows = [{"prompt": text, "answer": "1"} for text in ("12", "1234")]
    path = write_rows(*rows)
    load = lambda: _load(path, tokenizer, chat=False, max_tokens=3, overlong=kind)  # noqa: E731
    if kind == "refuse":
        with pytest.raises(DataError, match=r"rows.jsonl:2: 4 tokens, above data.max_tokens = 3"):
            load()
    else:
        kept = {"skip": ["12"], "truncate": ["12", "234"]}[kind]
        assert [tokenizer.decode(prompt.ids) for prompt in load()] == kept
