"""Reading numbers exactly."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax_rollout.rewards.math.number import is_parsable, is_unevaluated, read_number, tidy


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", Fraction(0)),
        ("-12", Fraction(-12)),
        ("+3", Fraction(3)),
        ("0012", Fraction(12)),
        ("1,234,567", Fraction(1234567)),
        ("3.50", Fraction(7, 2)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("1e3", Fraction(1000)),
        ("2.5E-1", Fraction(1, 4)),
        ("6/8", Fraction(3, 4)),
        ("-6/8", Fraction(-3, 4)),
        (r"\frac{1}{3}", Fraction(1, 3)),
        (r"-\frac{1}{3}", Fraction(-1, 3)),
        (r"\frac{-1}{3}", Fraction(-1, 3)),
        (r"\frac12", Fraction(1, 2)),
        ("3 1/2", Fraction(7, 2)),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        (r"-3\frac{1}{2}", Fraction(-7, 2)),
        (r"2 \times 10^3", Fraction(2000)),
        (r"1.5 \cdot 10^{-2}", Fraction(3, 200)),
        ("1/0", None),
        (r"\frac{1}{0}", None),
        ("3 1/0", None),
        ("1,23", None),
        ("3+4", None),
        ("x", None),
        ("", None),
        ("1e9999", None),
        ("9" * 201, None),
        ("0x10", None),
        ("1_000", None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_the_value_is(text, value):
    assert read_number(text) == value


@given(st.fractions(max_denominator=10**9))
def test_every_ratio_reads_back(value):
    assert read_number(f"{value.numerator}/{value.denominator}") == value
    assert read_number(str(value.numerator)) == value.numerator


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_every_decimal_reads_back(value):
    assert read_number(f"{value:f}") == Fraction(value)


@pytest.mark.parametrize(
    ("text", "tidied"),
    [
        (" $42$ ", "42"),
        (r"\(42\)", "42"),
        ("42.", "42"),
        (r"12\text{ apples}", "12 apples"),
        (r"\text{B}", "B"),
        (r"1\,000", "1000"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        ("\u22125", "-5"),
        ("**7**", "7"),
    ],
)
def test_tidy_drops_what_changes_nothing(text, tidied):
    assert tidy(text) == tidied


@pytest.mark.parametrize(
    "text", ["3+4", "3 - 4", r"3 \times 4", "(2)(3)", "12/3/4", "1, 2", "--5", "((1)+(2))"]
)
def test_arithmetic_left_undone(text):
    assert is_unevaluated(text)


@pytest.mark.parametrize("text", ["7", "-7", "3/4", "3 1/2", "x+1", r"\sqrt{2}+1", "2^3", "(7)", ""])
def test_not_arithmetic(text):
    assert not is_unevaluated(text)


@pytest.mark.parametrize(
    "text", ["a__b", "f(`x`)", 'x"', "a;b", "import@", "{" * 61, "(" * 1000, "\x00", "x#", "\u202e"]
)
def test_text_that_the_parser_never_sees(text):
    assert not is_parsable(text)


@pytest.mark.parametrize(
    "text", ["10**10**10", "10^{10^{10}}", "(2^{9})^{99999}", "10000!", "5!!", "9^9^9", "2^{12345}"]
)
def test_numbers_too_large_to_compute(text):
    assert not is_parsable(text)


@pytest.mark.parametrize("text", ["2^{10}", "x^{n^2}", "2^{2^n}", "2^{1234}", "100!", "x^2 y^2"])
def test_powers_that_answers_have(text):
    assert is_parsable(text)


@pytest.mark.parametrize("text", [r"\frac{\sqrt{3}}{2}", "x^2 + 1", r"[0, \infty)", r"f'(x) = 2x", "é = π"])
def test_text_that_it_may(text):
    assert is_parsable(text)
