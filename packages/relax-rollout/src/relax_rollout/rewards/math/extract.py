r"""Finding the final answer in a completion.

In this order: the last complete ``\boxed{...}`` (or ``\fbox{...}``); what follows the last ``####`` or
``answer is`` or ``answer:``; the whole text if it is one short line without words; the last number in the
text. A completion whose only box is cut off has no answer.
"""

import re

MAX_ANSWER_CHARS = 400
"""An answer longer than this is no answer: nobody writes it, and parsers take their time over it."""

MAX_BOXES = 8
"""Only this many boxes from the end are looked at, so that a text of thousands of open ones stays cheap."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|\d)")
_MARK = re.compile(r"(?:####|\banswer\s*(?:is\b|:|=)\s*:?)", re.IGNORECASE)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+|/\d+)?|-?\.\d+")
_PADDING = " \t\r\n*_`"
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")


def last_box(text: str) -> str | None:
    r"""Content of the last complete ``\boxed``, braces balanced; None without one."""
    for match in list(_BOX.finditer(text))[: -MAX_BOXES - 1 : -1]:
        if match[1] != "{":
            return match[1]
        end = _closing_brace(text, match.end())
        if end is not None:
            return text[match.end() : end].strip()
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for match in re.compile(r"\\.|[{}]").finditer(text, start, start + 4 * MAX_ANSWER_CHARS):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def final_answer(text: str) -> str | None:
    """The final answer, as written; None if there is none or it is longer than MAX_ANSWER_CHARS."""
    whole = text.strip(_PADDING)
    found = whole if _NUMBER.fullmatch(whole) else _find(whole)
    return found if found and len(found) <= MAX_ANSWER_CHARS else None


def _find(whole: str) -> str | None:
    if _BOX.search(whole):
        return last_box(whole)
    marks = list(_MARK.finditer(whole))
    if marks:
        return _first_sentence(whole[marks[-1].end() :].strip(_PADDING).split("\n", 1)[0])
    if len(whole) <= MAX_ANSWER_CHARS and "\n" not in whole and not _WORD.search(whole):
        return _after_equals(whole)
    numbers = _NUMBER.findall(whole)
    return numbers[-1] if numbers else None


def _first_sentence(line: str) -> str:
    """The line up to the full stop that ends its first sentence; of ``42 apples`` the number."""
    sentence = re.split(r"[.;!?](?:\s|$)", line, maxsplit=1)[0].strip(_PADDING)
    counted = _NUMBER.match(sentence)
    if counted and re.match(r"\s+[A-Za-z]{2,}", sentence[counted.end() :]):
        return counted[0]
    return _after_equals(sentence)


def _after_equals(text: str) -> str:
    """Of a chain such as ``3 + 4 = 7`` what is right of its last equals sign; the rest is working."""
    left, sign, right = text.rpartition("=")
    if sign and not left.endswith(("<", ">", "!")) and _NUMBER.fullmatch(right.strip("$ ")):
        return right.strip("$ ")
    return text
