import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax_core.config.yaml_text import YamlError, dump_yaml, parse_scalar, parse_yaml, show


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("-3", -3),
        ("1_000", 1000),
        ("010", 10),
        (".5", 0.5),
        (".inf", math.inf),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("off", "off"),
        ("2024-01-02", "2024-01-02"),
        ("1:30", "1:30"),
        ("[1, 2.5, a]", [1, 2.5, "a"]),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    parsed = parse_scalar(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_the_line_of_every_key_is_known():
    values, lines = parse_yaml("# a comment\nrun:\n  steps: 3\ntrainer: {lr: 1e-3}\n")
    assert values == {"run": {"steps": 3}, "trainer": {"lr": 1e-3}}
    assert lines == {("run",): 2, ("run", "steps"): 3, ("trainer",): 4, ("trainer", "lr"): 4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run:\n  steps: 1\n  steps: 2\n", "line 3: run.steps is set twice, first in line 2"),
        ("- a\n", "the top of the file must be a mapping"),
        ("run: [1\n", "line 2, column 1"),
        ("run:\n\t steps: 1\n", "line 2"),
        ("1: 2\n", "the key 1 must be text"),
        ("run: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("run: &r\n  steps: *r\n", "line 1: the value contains itself"),
        ("run:\n  a: &a [1, [*a]]\n", "line 2: the value contains itself"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("run: \x1f\n", "unacceptable character #x001f"),
    ],
)
def test_what_is_no_mapping_is_refused_with_its_line(text, words):
    with pytest.raises(YamlError, match=words.replace("[", r"\[")):
        parse_yaml(text)


def test_an_empty_file_holds_nothing():
    assert parse_yaml("# only a comment\n") == ({}, {})


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_trees = st.dictionaries(st.text(min_size=1), _scalars | st.lists(_scalars, max_size=3), max_size=5)


@given(_trees)
def test_writing_and_reading_gives_the_same_values_in_the_same_order(tree):
    parsed, _ = parse_yaml(dump_yaml(tree))
    assert parsed == tree
    assert list(parsed) == list(tree)
    assert [type(value) for value in parsed.values()] == [type(value) for value in tree.values()]


@given(_scalars)
def test_a_shown_value_reads_back(value):
    assert parse_scalar(show(value)) == value
