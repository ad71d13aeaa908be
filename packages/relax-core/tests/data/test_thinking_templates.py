"""Conversations of several turns through a template that treats thoughts as Qwen3.5's does.

A thought is shown behind the last question alone; an answer to it opens with one, and is given one that is
closed already where thinking is switched off.
"""

import json

import pytest
from relax_core.data import DataConfig, DataError, load_prompts, load_samples, load_tokenizer

TEMPLATE = """\
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- set thought = (m.reasoning_content or '') | trim %}{%- set said = m.content | trim %}
{%- if '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1] | trim %}
{%- set said = said.split('</think>')[-1] | trim %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.asked %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}
{%- endif %}
{{- said + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}
{%- if enable_thinking is false %}{{- '\n</think>\n\n' }}{%- endif %}{%- endif %}
"""
TURNS = [
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "<think>1 plus 1</think>2"},
    {"role": "user", "content": "2 + 3"},
    {"role": "assistant", "content": "5", "reasoning_content": "2 plus 3"},
]
WITH_A_CALL = [TURNS[0], TURNS[1], {"role": "tool", "content": "2"}, {**TURNS[3], "content": "7"}]
HISTORY = "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
SECOND = f"{HISTORY}2<|im_end|>\n<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def texts(tokenizer_folder, tmp_path, write_rows):
    """(what stands before what is learnt, what is learnt) of every turn of every sample."""
    tokenizer = load_tokenizer(tokenizer_folder)
    (tmp_path / "template.jinja").write_text(TEMPLATE)

    def load(turns, **settings):
        cfg = DataConfig(
            path=write_rows({"messages": turns}), chat_template=tmp_path / "template.jinja", **settings
        )
        found = []
        for sample in load_samples(cfg, tokenizer, seed=0).train:
            text = [tokenizer.decode([token]) for token in sample.ids]
            runs, at = [], 0
            for place in range(1, len(text) + 1):
                if place == len(text) or sample.loss_mask[place] != sample.loss_mask[place - 1]:
                    runs.append("".join(text[at:place]))
                    at = place
            found.append(list(zip(runs[::2], runs[1::2], strict=True)))
        return found

    return load


def test_several_questions_are_refused_where_thoughts_vanish_and_split_on_demand(texts):
    with pytest.raises(DataError, match=r"renders message 1 differently .* Set data.rewritten_history"):
        texts(TURNS)
    assert texts(TURNS, rewritten_history="split") == [
        [(f"{HISTORY}<think>\n", "1 plus 1\n</think>\n\n2<|im_end|>")],
        [(f"{SECOND}<think>\n", "2 plus 3\n</think>\n\n5<|im_end|>")],
    ]


def test_dropped_thoughts_leave_an_empty_one_to_learn_or_given_where_thinking_is_off(texts):
    split = {"rewritten_history": "split", "thinking": "drop"}
    assert texts(TURNS, **split) == [
        [(f"{HISTORY}<think>\n", "\n</think>\n\n2<|im_end|>")],
        [(f"{SECOND}<think>\n", "\n</think>\n\n5<|im_end|>")],
    ]
    assert texts(TURNS, **split, template_args={"enable_thinking": False}) == [
        [(f"{HISTORY}<think>\n\n</think>\n\n", "2<|im_end|>")],
        [(f"{SECOND}<think>\n\n</think>\n\n", "5<|im_end|>")],
    ]


def test_turns_around_a_tools_answer_are_one_sample(texts):
    between = "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert texts(WITH_A_CALL) == [
        [
            (f"{HISTORY}<think>\n", "1 plus 1\n</think>\n\n2<|im_end|>"),
            (between, "2 plus 3\n</think>\n\n7<|im_end|>"),
        ]
    ]


def test_what_is_learnt_follows_what_a_prompt_of_the_same_turns_ends_with(texts, tokenizer, tmp_path):
    row = {"messages": TURNS[:3], "answer": "5"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row))
    for args in ({}, {"enable_thinking": False}):
        cfg = DataConfig(
            path=str(tmp_path / "prompts.jsonl"),
            chat_template=tmp_path / "template.jinja",
            template_args=args,
        )
        (prompt,) = load_prompts(cfg, tokenizer, seed=0).train
        thinking = "drop" if args else "keep"
        found = texts(TURNS, rewritten_history="split", thinking=thinking, template_args=args)
        assert tokenizer.decode(prompt.ids) == found[1][0][0]
