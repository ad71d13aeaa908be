r"""Numbers as people write them, read exactly and at a bounded cost."""

import re
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_PLAIN = re.compile(rf"([+-]?)\s*({_DECIMAL})(?:[eE]([+-]?\d{{1,3}}))?")
_RATIO = re.compile(rf"([+-]?)\s*({_DIGITS})\s*/\s*({_DIGITS})")
_FRAC = re.compile(rf"([+-]?)\s*\\frac\s*\{{\s*([+-]?{_DIGITS})\s*\}}\s*\{{\s*([+-]?{_DIGITS})\s*\}}")
_FRAC_SHORT = re.compile(r"([+-]?)\s*\\frac\s*(\d)\s*(\d)")
_MIXED = re.compile(
    r"([+-]?)\s*(\d{1,20})\s*(?:\s(\d{1,20})\s*/\s*(\d{1,20})|\\frac\s*\{\s*(\d{1,20})\s*\}\s*\{\s*(\d{1,20})\s*\})"
)
_TIMES_POWER = re.compile(
    r"(.+?)\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|(\d))"
)
_ARITHMETIC = re.compile(r"(?:[\d\s.,()+\-*/\u00d7\u00f7]|\\times|\\cdot|\\div|\\left|\\right)+")
_OPERATOR = re.compile(r"\d\s+[\d.]|[+\-*/\u00d7\u00f7,]|\\times|\\cdot|\\div|\)\s*\(")

MAX_NESTING = 60
_HUGE = re.compile(r"\^[\s{(]*\d+[\s})]*\^[\s{(]*\d|\^[\s{(]*\d{5,}|\d{4,}[\s})]*!|![\s})]*!|\*\*")
_ALLOWED = re.compile(r"[\w\s\\{}()\[\]+\-*/^=<>.,|!:%$&'°\u2032≤≥≠±\u00d7\u00f7·√∞\u222a∩∈\u2212~]*")

MAX_CHARS = 200
"""Digits enough for any answer; longer ones are left to the symbolic judge."""


def tidy(text: str) -> str:
    r"""The answer without what changes nothing: dollar signs, spacing, ``\text{}``, a final full stop."""
    text = text.strip()
    if text.startswith(("\\(", "\\[")) and text.endswith(("\\)", "\\]")):
        text = text[2:-2]
    text = text.strip("$").strip()
    if "\\" in text:
        text = _plain_latex(text)
    return text.replace("\u2212", "-").strip("*` ~").rstrip(".").strip()


def _plain_latex(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[,!;: ]|~", "", text)
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def read_number(text: str) -> Fraction | None:
    r"""The exact value of an integer, decimal, ratio, mixed number, any times a power of ten; else None.

    Args:
        text: as :func:`tidy` leaves it.
    """
    if len(text) > MAX_CHARS:
        return None
    if match := _TIMES_POWER.fullmatch(text):
        value = _read_simple(match[1])
        return None if value is None else value * Fraction(10) ** int(match[2] or match[3])
    return _read_simple(text)


def _read_simple(text: str) -> Fraction | None:
    if match := _PLAIN.fullmatch(text):
        sign, digits, exponent = match.groups()
        value = Fraction(_digits(digits)) * Fraction(10) ** int(exponent or 0)
    elif match := _RATIO.fullmatch(text) or _FRAC.fullmatch(text) or _FRAC_SHORT.fullmatch(text):
        sign, above, below = match.groups()
        if int(_digits(below)) == 0:
            return None
        value = Fraction(int(_digits(above)), int(_digits(below)))
    elif match := _MIXED.fullmatch(text):
        sign, whole, *parts = match.groups()
        above, below = (int(part) for part in parts if part)
        if below == 0:
            return None
        value = int(whole) + Fraction(above, below)
    else:
        return None
    return -value if sign == "-" else value


def _digits(text: str) -> str:
    return text.replace(",", "")


def is_unevaluated(text: str) -> bool:
    """Whether the text is arithmetic on numbers that was not carried out, such as ``3 + 4`` or ``(2)(3)``."""
    if read_number(text) is not None or not _ARITHMETIC.fullmatch(text):
        return False
    return _OPERATOR.search(text) is not None


def is_parsable(text: str) -> bool:
    """Whether the text may go to the parser: nesting is bounded, characters are those of LaTeX answers.

    Numbers that are written in a few characters and take ages to compute (towers of powers, large factorials)
    are turned away too. This saves time; safety rests on the worker's limits.
    """
    depth = 0
    for char in text:
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(char, 0)
        if depth > MAX_NESTING:
            return False
    return "__" not in text and _ALLOWED.fullmatch(text) is not None and _HUGE.search(text) is None
