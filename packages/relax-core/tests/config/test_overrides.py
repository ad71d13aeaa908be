import pytest
from relax_core.config.overrides import parse_overrides
from relax_core.config.section import Section, setting


class Inner(Section):
    """Inner."""

    number: float = setting(1.0, "A number.")
    count: int | None = setting(None, "A count.")
    switch: bool = setting(False, "A switch.")
    text: str = setting("", "A text.")
    columns: dict[str, str] = setting({}, "Columns.")
    sizes: tuple[int, ...] = setting((), "Sizes.")


class Root(Section):
    """Root."""

    inner: Inner = setting(Inner(), "Inner.")


def read(*arguments):
    layer = parse_overrides(Root, arguments)
    return layer.values.get("inner", {}), [problem.message for problem in layer.problems]


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--inner.number", "1e-6"], {"number": 1e-6}),
        (["--inner.number=-1e-3"], {"number": -1e-3}),
        (["--inner.number", "-1e-3"], {"number": -1e-3}),
        (["--inner.count", "null"], {"count": None}),
        (["--inner.switch"], {"switch": True}),
        (["--inner.switch", "--inner.count", "2"], {"switch": True, "count": 2}),
        (["--inner.switch", "false"], {"switch": False}),
        (["--inner.text", "007"], {"text": "007"}),
        (["--inner.text", "null"], {"text": "null"}),
        (["--inner.text", "a: [b"], {"text": "a: [b"}),
        (["--inner.text="], {"text": ""}),
        (["--inner.text=--flag"], {"text": "--flag"}),
        (["--inner.columns", "{prompt: question}"], {"columns": {"prompt": "question"}}),
        (["--inner.columns.prompt", "12"], {"columns": {"prompt": "12"}}),
        (["--inner.sizes", "[1, 2]"], {"sizes": [1, 2]}),
    ],
)
def test_flags_are_read_by_the_type_of_their_field(arguments, values):
    assert read(*arguments) == (values, [])


def test_every_bad_flag_is_reported():
    values, messages = read(
        *("stray", "--inner.numbr", "1", "--inner.number", "--inner.count", "2", "--inner.count", "3"),
        *("--inner.sizes", "[1"),
    )
    assert values == {"count": 2}
    assert messages[0] == "a value without a flag"
    assert messages[1] == "unknown flag"
    assert messages[2] == "the flag needs a value"
    assert messages[3] == "the flag is given twice"
    assert messages[4].startswith("cannot be read")


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [("--inner.numbr", "--inner.number"), ("--number", "--inner.number"), ("--iner.count", "--inner.count")],
)
def test_an_unknown_flag_names_the_nearest(flag, nearest):
    (problem,) = parse_overrides(Root, [flag, "1"]).problems
    assert problem.given == flag
    assert problem.nearest == nearest


def test_a_flag_like_nothing_names_no_other():
    (problem,) = parse_overrides(Root, ["--zzzzzz", "1"]).problems
    assert problem.nearest is None
