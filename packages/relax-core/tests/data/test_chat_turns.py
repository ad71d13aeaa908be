import pytest
from relax_core.data import DataConfig, DataError
from relax_core.data.chat import ChatRenderer
from relax_core.data.problems import RowError
from relax_core.data.turns import RewrittenHistoryError, assistant_turns, single_turns

ENDS = frozenset({"<|im_end|>", "<|im_start|>"})
CHAT = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "2 plus 3"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "and 4"},
    {"role": "assistant", "content": "9"},
    {"role": "user", "content": "bye"},
]
# Shows a thought in the last turn only, as templates of thinking models do.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>' + m.thought + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"
)
MARK = "{% if m.role == 'assistant' %}{% generation %}BODY{% endgeneration %}TAIL{% else %}"
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    + MARK
    + "{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _marked(body, tail=""):
    return MARKED.replace("BODY", body).replace("TAIL", tail)


def _spoken(rendered):
    return [rendered.text[start:end] for start, end in rendered.spans]


def _turns(tokenizer, template, messages=CHAT, split=False):
    renderer = ChatRenderer(tokenizer, template, {})
    return (single_turns if split else assistant_turns)(renderer, messages, None, ENDS)


@pytest.mark.parametrize("marks", [True, False])
def test_every_turn_is_found_with_its_end_token_and_nothing_behind_the_last(tokenizer, unmarked, marks):
    rendered = _turns(tokenizer, None if marks else unmarked.read_text())
    assert _spoken(rendered) == ["5<|im_end|>", "9<|im_end|>"]
    assert rendered.text == (
        "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n2 plus 3<|im_end|>\n<|im_start|>assistant\n5"
        "<|im_end|>\n<|im_start|>user\nand 4<|im_end|>\n<|im_start|>assistant\n9<|im_end|>"
    )
    assert "".join(text for text, _ in rendered.pieces()) == rendered.text
    assert [learned for _, learned in rendered.pieces()] == [False, True, False, True]


def test_marks_may_leave_out_the_start_of_a_turn(tokenizer):
    template = _marked("{{ m.content + '<|im_end|>' }}", "{{ '\\n' }}").replace(
        "{% generation %}", "{{ 'so: ' }}{% generation %}"
    )
    rendered = _turns(tokenizer, template)
    assert _spoken(rendered) == ["5<|im_end|>", "9<|im_end|>"]
    assert "assistant\nso: 5<|im_end|>" in rendered.text


def test_a_newline_that_is_marked_behind_the_end_token_is_not_learned(tokenizer):
    assert _spoken(_turns(tokenizer, _marked("{{ m.content + '<|im_end|>\\n' }}"))) == [
        "5<|im_end|>",
        "9<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            _marked("{{ m.content }}", "{{ '<|im_end|>\\n' }}"),
            "marks '5' where the assistant says '5<|im_end|>'",
        ),
        (
            _marked("{{ '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}").replace(
                "{{ '<|im_start|>' + m.role + '\\n' }}",
                "{% if m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\\n' }}{% endif %}",
            ),
            r"marks '<\|im_start\|>assistant\\n5<\|im_end\|>' where the assistant says '5<\|im_end\|>'",
        ),
        (
            _marked("{{ m.content + '<|im_end|>\\n' }}").replace(
                "m.role == 'assistant' %}{% gen", "m.role == 'assistant' and loop.last %}{% gen"
            ),
            "marks 0 assistant turns where there are 2",
        ),
    ],
)
def test_marks_that_do_not_fit_what_the_model_samples_are_refused(tokenizer, template, message):
    with pytest.raises(RowError, match=message.replace("5<|im_end|>'", r"5<\|im_end\|>'")):
        _turns(tokenizer, template)


def test_a_template_that_rewrites_history_is_refused_or_split_into_turns(tokenizer):
    messages = [{**m, "thought": f"t{n}"} for n, m in enumerate(CHAT[:5])]
    with pytest.raises(
        RewrittenHistoryError, match=r"renders message 2 differently .* data.rewritten_history"
    ):
        _turns(tokenizer, FORGETFUL, messages)
    first, second = _turns(tokenizer, FORGETFUL, messages, split=True)
    assert _spoken(first) == ["t2</think>5<|im_end|>"]
    assert _spoken(second) == ["t4</think>9<|im_end|>"]
    assert first.text.endswith("2 plus 3<|im_end|>\n<|im_start|>assistant\n<think>t2</think>5<|im_end|>")
    assert (
        "assistant\n5<|im_end|>\n<|im_start|>user\nand 4" in second.text
    )  # history without the first thought


def test_splitting_with_marks_takes_the_last_mark(tokenizer):
    first, second = _turns(tokenizer, None, split=True)
    assert (_spoken(first), _spoken(second)) == (["5<|im_end|>"], ["9<|im_end|>"])
    assert first.text == second.text[: len(first.text)]


def test_a_turn_must_continue_the_generation_prompt(tokenizer, unmarked):
    template = unmarked.read_text().replace("assistant\\n' }}", "assistant\\n<think>' }}")
    for split in (False, True):
        with pytest.raises(
            RewrittenHistoryError, match="message 2 does not continue what the chat template gives"
        ):
            _turns(tokenizer, template, split=split)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (CHAT[:2], "no assistant message to learn from"),
        (CHAT[2:], "starts with the assistant"),
    ],
)
def test_conversations_without_a_turn_to_learn_are_refused(tokenizer, messages, message):
    with pytest.raises(RowError, match=message):
        _turns(tokenizer, None, messages)


def test_a_template_without_an_end_token_is_refused(tokenizer, unmarked):
    template = unmarked.read_text().replace("<|im_end|>\\n", "\\n")
    with pytest.raises(RowError, match="ends message 2 with no special token"):
        _turns(tokenizer, template)


@pytest.mark.parametrize("position", [0, 2, 3])
def test_a_message_that_holds_the_end_of_a_turn_is_refused(tokenizer, position):
    """It would be turns of its own, and of the assistant's one what stands behind its end would be learnt."""
    messages = [dict(message) for message in CHAT]
    messages[position]["content"] += "<|im_end|>\n<|im_start|>assistant\n"
    for split in (False, True):
        with pytest.raises(RowError, match=rf"message {position} holds '<\|im_end\|>', which ends a turn"):
            _turns(tokenizer, None, messages, split=split)


def test_a_call_that_holds_the_end_of_a_turn_is_refused(tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {"text": "1<|im_end|>"}}}
    messages = [*CHAT[:4], {**CHAT[4], "tool_calls": [call]}]
    with pytest.raises(RowError, match=r"message 4 holds '<\|im_end\|>', which ends a turn"):
        _turns(tokenizer, None, messages)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ 'a'.index('b') }}", "substring not found"),
    ],
)
def test_what_a_template_refuses_is_said(tokenizer, body, words):
    with pytest.raises(RowError, match=f"the chat template refuses the conversation: {words}"):
        _turns(tokenizer, body)


def test_arguments_and_tools_reach_the_template(tokenizer):
    renderer = ChatRenderer(tokenizer, "{{ mood }} {{ tools[0].name }} {{ eos_token }}", {"mood": "glad"})
    assert renderer.render(CHAT, [{"name": "add"}], open_turn=False) == "glad add <|im_end|>"


def test_a_tokenizer_without_a_template_needs_one(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(DataError, match=r"no chat template: set data\.chat_template"):
        ChatRenderer.of(DataConfig(path="x"), tokenizer)
    with pytest.raises(DataError, match=r"data\.chat_template .* cannot be read"):
        ChatRenderer.of(DataConfig(path="x", chat_template=tmp_path / "none"), tokenizer)
