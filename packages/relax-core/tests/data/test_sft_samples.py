"""Masks are compared with transformers' own, and with what tokens decode to."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.data import DataConfig, DataError, load_prompts, load_samples
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TURN = st.text("0123 plusminfory+-\n", max_size=8)
# A thinking template: the opening ends in one newline, the turn goes on with another.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)


def _load(path, tokenizer, **changes):
    return load_samples(DataConfig(path=path, **changes), tokenizer, seed=0)


def _byte_level_tokenizer():
    """Bytes, and one merge: two newlines are one token, as in every large vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=THINKING,
    )


def _learned(sample, tokenizer):
    """Decoded runs of learned tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask.astype(int), [0]])))
    return [tokenizer.decode(sample.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(TURN, TURN), min_size=1, max_size=3))
def test_learned_tokens_are_the_assistants_words_and_transformers_agrees(tokenizer, tmp_path_factory, turns):
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    (sample,) = _load(str(file), tokenizer).train
    assert _learned(sample, tokenizer) == [text + "<|im_end|>" for _, text in turns]
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    kept = len(sample.ids)
    assert sample.ids.tolist() == theirs["input_ids"][:kept]
    assert sample.loss_mask.tolist() == [bool(m) for m in theirs["assistant_masks"][:kept]]
    assert not any(theirs["assistant_masks"][kept:])


def test_a_template_without_marks_gives_the_same_samples(tokenizer, write_rows, unmarked):
    path = write_rows(
        {
            "messages": [
                {"role": "user", "content": "2 plus 3"},
                {"role": "assistant", "content": "5"},
                {"role": "user", "content": "1 + 1"},
                {"role": "assistant", "content": "2"},
            ]
        }
    )
    (marked,), (plain,) = _load(path, tokenizer).train, _load(path, tokenizer, chat_template=unmarked).train
    assert marked.ids.tolist() == plain.ids.tolist()
    assert marked.loss_mask.tolist() == plain.loss_mask.tolist()
    assert (
        marked.prompt_text
        == plain.prompt_text
        == "<|im_start|>user\n2 plus 3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_model_learns_after_the_very_tokens_that_the_sampler_gives_it(write_rows):
    tokenizer = _byte_level_tokenizer()
    path = write_rows({"prompt": "hi", "completion": "ho", "answer": "ho"})
    (sample,) = _load(path, tokenizer).train
    (prompt,) = load_prompts(DataConfig(path=path), tokenizer, seed=0).train
    start = int(sample.loss_mask.argmax())
    assert sample.ids[:start].tolist() == prompt.ids.tolist()
    assert _learned(sample, tokenizer) == ["\n</think>\n\nho<|im_end|>"]
    # Tokenised in one go, the newlines on both sides of the border would have become one token.
    at_once = tokenizer(tokenizer.decode(sample.ids), add_special_tokens=False)["input_ids"]
    assert len(at_once) == len(sample.ids) - 1


def test_prompt_and_completion_become_one_turn(tokenizer, write_rows):
    path = write_rows({"prompt": "2 plus 3", "completion": "5", "answer": "5"})
    (sample,) = _load(path, tokenizer, system_prompt="add").train
    assert tokenizer.decode(sample.ids) == (
        "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n2 plus 3<|im_end|>\n"
        "<|im_start|>assistant\n5<|im_end|>"
    )
    assert _learned(sample, tokenizer) == ["5<|im_end|>"]
    assert sample.ids.dtype == np.int32
    assert sample.loss_mask.dtype == np.bool_


def test_plain_text_ends_with_the_end_of_text_token(tokenizer, write_rows):
    path = write_rows({"prompt": "2 plus 3", "completion": " = 5"})
    (sample,) = _load(path, tokenizer, chat=False).train
    assert tokenizer.decode(sample.ids) == "2 plus 3 = 5<|im_end|>"
    assert _learned(sample, tokenizer) == [" = 5<|im_end|>"]
    assert sample.prompt_text == "2 plus 3"


def test_plain_text_that_holds_its_end_is_refused(tokenizer, write_rows):
    path = write_rows({"prompt": "2 plus 3", "completion": " = 5<|im_end|> 6"})
    with pytest.raises(DataError, match=r"completion holds '<\|im_end\|>', which is put behind it"):
        _load(path, tokenizer, chat=False)


def test_plain_text_needs_an_end_of_text_token(write_rows):
    tokenizer = _byte_level_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-text token"):
        _load(write_rows({"prompt": "a", "completion": "b"}), tokenizer, chat=False)


def test_rewritten_history_gives_one_sample_a_turn_if_allowed(write_rows):
    forgetful = THINKING.replace("m.role == 'assistant' %}", "m.role == 'assistant' and loop.last %}")
    tokenizer = _byte_level_tokenizer()
    tokenizer.chat_template = forgetful
    path = write_rows(
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ]
        }
    )
    with pytest.raises(DataError, match=r"rows.jsonl:1: the chat template renders message 1 differently"):
        _load(path, tokenizer)
    first, second = _load(path, tokenizer, rewritten_history="split").train
    assert [first.id, second.id] == [f"{path}:1#1", f"{path}:1#2"]
    assert _learned(first, tokenizer) == ["\n</think>\n\nb<|im_end|>"]
    assert _learned(second, tokenizer) == ["\n</think>\n\nd<|im_end|>"]
    assert first.prompt_text == second.prompt_text  # one row, one side of a split


def test_a_tokenizer_that_loses_text_is_found_out(tokenizer, write_rows):
    path = write_rows({"prompt": "2 plus 3", "completion": "fünf"})
    with pytest.raises(
        DataError, match=r"gives back 'f<\|unknown\|>nf<\|im_end\|>' where the assistant says 'fünf"
    ):
        _load(path, tokenizer)
    path = write_rows({"prompt": "zwölf", "completion": "12"})
    with pytest.raises(DataError, match="does not give back the conversation"):
        _load(path, tokenizer)


def test_text_that_the_tokenizer_composes_is_the_same_text(write_rows):
    tokenizer = _byte_level_tokenizer()
    (sample,) = _load(write_rows({"prompt": "a", "completion": "u\u0308"}), tokenizer).train
    assert _learned(sample, tokenizer) == ["\n</think>\n\n\u00fc<|im_end|>"]


@pytest.mark.parametrize("kind", ["refuse", "skip", "truncate"])
def test_samples_above_the_limit(tokenizer, write_rows, kind):
    # 15 tokens, the last two of them learned; the second row has one more.
    path = write_rows(
        {"prompt": "12 plus 34", "completion": "5"}, {"prompt": "12 plus 34", "completion": "46"}
    )
    load = lambda limit: _load(path, tokenizer, max_tokens=limit, overlong=kind).train  # noqa: E731
    assert [len(s.ids) for s in load(16)] == [15, 16]
    if kind == "refuse":
        with pytest.raises(DataError, match=r"rows.jsonl:2: 16 tokens, above data.max_tokens = 15"):
            load(15)
    elif kind == "skip":
        assert [len(s.ids) for s in load(15)] == [15]
    else:
        assert [_learned(s, tokenizer) for s in load(15)] == [["5<|im_end|>"], ["46"]]
        with pytest.raises(DataError, match=r"nothing to learn is left within data\.max_tokens"):
            load(13)


def test_a_prompt_that_ends_with_the_assistant_takes_no_completion(tokenizer, write_rows):
    path = write_rows({"prompt": [{"role": "assistant", "content": "x"}], "completion": "y"})
    with pytest.raises(DataError, match="ends with an assistant message and has a completion besides"):
        _load(path, tokenizer)


@pytest.mark.parametrize(("thinking", "learned"), [("keep", "<think>3+4</think>7"), ("drop", "7")])
def test_thoughts_are_kept_or_dropped(write_rows, tokenizer, thinking, learned):
    turns = [{"role": "user", "content": "3+4"}, {"role": "assistant", "content": "<think>3+4</think>7"}]
    cfg = DataConfig(path=write_rows({"messages": turns}), thinking=thinking)
    (sample,) = load_samples(cfg, tokenizer, seed=0).train
    assert tokenizer.decode(sample.ids[sample.loss_mask]) == learned + "<|im_end|>"


def test_pictures_without_a_key_are_refused(write_rows, tokenizer):
    turns = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "7"}]
    with pytest.raises(
        DataError, match=r"the conversation has pictures: set data.images_key and model.vision"
    ):
        load_samples(DataConfig(path=write_rows({"messages": turns})), tokenizer, seed=0)
