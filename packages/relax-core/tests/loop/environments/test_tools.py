"""Tools that models call: what they are told when it works, and when it does not."""

import asyncio
import os

import pytest
from relax_core.loop.environments.calculator import calculator
from relax_core.loop.environments.calls import ToolCall
from relax_core.loop.environments.tools import Tools, tool_schemas

CALCULATOR = "relax_core.loop.environments.calculator:calculator"


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_tools.py").write_text(
        "import os, time\n"
        "def twice(number: int) -> int:\n    return 2 * number\n"
        "async def later(text: str) -> str:\n    return text + '!'\n"
        "def sleep(seconds: float) -> str:\n    time.sleep(seconds)\n"
        "def crash() -> str:\n    os._exit(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "my_tools"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * 4", "14"), ("(2+3)*4", "20"), ("1/3 - 1/4", "1/12"), ("-0.1*3", "-3/10"), ("7", "7")],
)
def test_the_calculator_is_exact(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize("expression", ["2**9", "__import__('os')", "1/0", "", "x"])
def test_the_calculator_computes_nothing_else(expression):
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculator(expression)


def test_calls_are_answered_and_failures_are_said(module):
    names = ("twice", "later", "sleep", "crash")
    specs = (CALCULATOR, *(f"{module}:{name}" for name in names))

    async def go():
        with Tools(specs, timeout_s=1.0, concurrency=2) as tools:
            calls = [
                ToolCall("calculator", {"expression": "6*7"}),
                ToolCall("twice", {"number": "21"}),
                ToolCall("later", {"text": "now"}),
                ToolCall("twice", {"count": 1}),
                ToolCall("sleep", {"seconds": "60"}),
                ToolCall("crash", {}),
                ToolCall("nothing", {}),
                ToolCall("", {}, "the call is no JSON"),
                ToolCall("calculator", {"expression": "1 +"}),
            ]
            return await asyncio.gather(*map(tools.call, calls))

    told = asyncio.run(go())
    assert told[:3] == ["42", "42", "now!"]
    assert told[3].startswith("error: TypeError: twice() got an unexpected keyword argument 'count'")
    assert told[4] == "error: no answer within 1 s"
    assert told[5].startswith("error: the reward worker ended by itself")
    assert told[6].startswith("error: there is no tool 'nothing'; there are calculator, twice")
    assert told[7] == "error: the call is no JSON"
    assert told[8].startswith("error: SyntaxError")


def test_tools_are_described_by_signature_and_docstring(module):
    (schema,) = tool_schemas([CALCULATOR])
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"]["required"] == ["expression"]
    with pytest.raises(ValueError, match="my_tools:twice' cannot be described to the model"):
        tool_schemas([f"{module}:twice"])


@pytest.mark.parametrize("spec", ["nowhere:f", "relax_core.loop.environments.calculator:missing"])
def test_a_tool_that_is_not_there_is_refused(spec):
    with pytest.raises(ValueError, match=r"tool .* cannot be imported"):
        Tools([spec], timeout_s=1, concurrency=1)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="have one name"):
        Tools([CALCULATOR, CALCULATOR], timeout_s=1, concurrency=1)
