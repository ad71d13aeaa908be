"""Tool calls as models write them."""

from relax_core.loop.environments.calls import ToolCall, tool_calls


def test_calls_in_json_and_in_xml_are_read_in_order():
    turn = (
        'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call> and '
        "<tool_call>\n<function=find>\n<parameter=text>\nline one\nline two\n</parameter>\n"
        "<parameter=limit>3</parameter>\n</function>\n</tool_call>"
    )
    assert tool_calls(turn) == [
        ToolCall("add", {"a": 1, "b": [2]}),
        ToolCall("find", {"text": "line one\nline two", "limit": "3"}),
    ]


def test_a_turn_without_calls_has_none_and_an_unfinished_one_is_none():
    assert tool_calls("4 <tool_call>") == []


def test_what_cannot_be_read_says_why():
    problems = [
        call.problem
        for call in tool_calls(
            "<tool_call>{</tool_call><tool_call>[1]</tool_call>"
            '<tool_call>{"name": "a", "arguments": 3}</tool_call>'
        )
    ]
    assert problems[0].startswith("the call is no JSON")
    assert problems[1:] == [
        "the call must be an object with a name and arguments",
        "arguments must be an object",
    ]
