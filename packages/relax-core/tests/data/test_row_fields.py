import pytest
from relax_core.data import DataConfig
from relax_core.data.fields import answer_of, completion_of, metadata_of, prompt_of, tools_of, wanted_keys
from relax_core.data.problems import RowError

USER = {"role": "user", "content": "hi"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": None}}],
}


def _cfg(**settings):
    return DataConfig(path="x.jsonl", **settings)


def test_text_becomes_the_users_turn_behind_the_system_prompt():
    assert prompt_of({"prompt": "hi"}, _cfg()) == (USER,)
    with_system = prompt_of({"prompt": "hi"}, _cfg(system_prompt="be kind"))
    assert with_system == ({"role": "system", "content": "be kind"}, USER)


def test_a_conversation_keeps_its_own_system_message():
    own = {"role": "system", "content": "mine"}
    assert prompt_of({"messages": [own, USER]}, _cfg(system_prompt="yours")) == (own, USER)


def test_a_prompt_may_be_a_conversation_and_keys_are_the_users():
    assert prompt_of({"question": [USER]}, _cfg(prompt_key="question")) == (USER,)
    assert prompt_of({"question": "hi"}, _cfg(prompt_key="question", chat=False)) == "hi"


def test_nulls_that_column_stores_add_are_dropped_and_a_call_needs_no_content():
    messages = prompt_of({"messages": [{**USER, "tool_calls": None}, CALL]}, _cfg())
    assert messages[0] == USER
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "add", "arguments": {"a": 1}}],
    }


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"question": "x"}, {}, r"no prompt nor messages \(the row has question\); data.prompt_key or data"),
        (
            {"prompt": None},
            {"messages_key": None},
            r"no prompt \(the row has nothing\); data.prompt_key names",
        ),
        (
            {"prompt": "x", "messages": [USER]},
            {},
            "both prompt and messages are there: set data.prompt_key or",
        ),
        ({"messages": "x"}, {}, "messages must be a list of messages, not text"),
        ({"messages": []}, {}, "messages must be text or a list of messages, not a list"),
        ({"messages": [USER, "x"]}, {}, r"messages\[1\] must be an object with role and content, not text"),
        ({"messages": [{"content": "x"}]}, {}, r"messages\[0\] has no role"),
        ({"messages": [{"role": "user"}]}, {}, r"messages\[0\].content must be text, not null"),
        (
            {"messages": [{"role": "user", "content": [1]}]},
            {},
            r"messages\[0\].content\[0\] must be an object of type text or image",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            {},
            r"messages\[0\] holds half a surrogate pair",
        ),
        ({"prompt": "\ud800"}, {}, "prompt holds half a surrogate pair"),
        ({"prompt": 3}, {}, "prompt must be text or a list of messages, not a number"),
        ({"prompt": [USER]}, {"chat": False}, "prompt is a conversation, which needs data.chat to be true"),
    ],
)
def test_malformed_prompts_say_what_is_wrong(fields, settings, message):
    with pytest.raises(RowError, match=message):
        prompt_of(fields, _cfg(**settings))


def test_completions():
    assert completion_of({"prompt": "a", "completion": "b"}, _cfg()) == "b"
    assert completion_of({"messages": [USER], "completion": "b"}, _cfg()) is None
    with pytest.raises(RowError, match=r"no completion \(the row has prompt\); data.completion_key names"):
        completion_of({"prompt": "a"}, _cfg())
    with pytest.raises(RowError, match="completion must be text, not a number"):
        completion_of({"prompt": "a", "completion": 3}, _cfg())


@pytest.mark.parametrize(
    ("value", "text"),
    [("7", "7"), (7, "7"), (-2.5, "-2.5"), (1e21, "1e+21"), (10**400, "1" + "0" * 400)],
    ids=["text", "whole", "fraction", "exponent", "beyond floats"],
)
def test_answers_are_text_or_numbers(value, text):
    assert answer_of({"answer": value}, _cfg()) == text


def test_other_answers_are_refused_and_none_is_needed_without_a_key():
    for value, kind in [(True, "a truth value"), ([1], "a list")]:
        with pytest.raises(RowError, match=f"answer must be text or a number, not {kind}"):
            answer_of({"answer": value}, _cfg())
    with pytest.raises(RowError, match="answer is nan, which is no number"):
        answer_of({"answer": float("nan")}, _cfg())
    with pytest.raises(RowError, match="no answer"):
        answer_of({"prompt": "x"}, _cfg())
    assert answer_of({"prompt": "x"}, _cfg(answer_key=None)) is None


def test_tools_are_a_list_or_json_text():
    tool = {"type": "function", "function": {"name": "add"}}
    assert tools_of({"tools": [tool]}, _cfg()) == [tool]
    assert tools_of({"tools": '[{"type": "function", "x": null}]'}, _cfg()) == [{"type": "function"}]
    assert tools_of({}, _cfg()) is None
    assert tools_of({"tools": [tool]}, _cfg(tools_key=None)) is None
    for bad in ("{", [1], {"a": 1}):
        with pytest.raises(RowError, match="tools"):
            tools_of({"tools": bad}, _cfg())


def test_metadata_is_what_was_asked_for():
    assert metadata_of({"level": 3, "other": 1}, _cfg(metadata_keys=("level",))) == {"level": 3}
    with pytest.raises(RowError, match="no level"):
        metadata_of({"other": 1}, _cfg(metadata_keys=("level",)))


def test_only_named_keys_are_read():
    cfg = _cfg(messages_key=None, tools_key=None, completion_key=None, metadata_keys=("level",))
    assert wanted_keys(cfg) == {"prompt", "answer", "level"}


def test_sharegpt_messages_are_read_as_roles_and_contents():
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
        {"from": "observation", "value": "o"},
    ]
    read = prompt_of({"messages": turns}, DataConfig(path="x"))
    assert read == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "o"},
    )
    with pytest.raises(RowError, match=r"messages\[0\].from is 'bard': it must be one of human, "):
        prompt_of({"messages": [{"from": "bard", "value": "a"}]}, DataConfig(path="x"))


def test_parts_of_text_are_joined_and_others_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = prompt_of({"messages": [{"role": "user", "content": parts}]}, DataConfig(path="x"))
    assert message == {"role": "user", "content": "ab"}
    for part, reason in (
        ({"type": "video"}, "must be an object of type text or image"),
        ({"type": "text"}, "has no text"),
    ):
        with pytest.raises(RowError, match=reason):
            prompt_of({"messages": [{"role": "user", "content": [part]}]}, DataConfig(path="x"))
