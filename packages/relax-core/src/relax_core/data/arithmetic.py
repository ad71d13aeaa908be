"""The quickstart's task: sums and differences of numbers in digits and English words, with a held-out split.

Everything follows from hashes of the seed, so that files are the same bytes on every machine.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relax_core.data.problems import DataError

ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen",
    "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
OPERATORS = {"+": ("+", "plus"), "-": ("-", "minus")}
_FORMS = 8


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """A sum or a difference that is not negative; sums are kept with the smaller number first."""

    operator: str
    left: int
    right: int

    @property
    def answer(self) -> int:
        """The result."""
        return self.left + self.right if self.operator == "+" else self.left - self.right


@dataclass(frozen=True, slots=True)
class ArithmeticTask:
    """Which problems there are.

    Attributes:
        smallest: least operand.
        largest: greatest operand, below 1000.
        operators: characters out of "+-".

    Raises:
        DataError: the numbers are out of range, or an operator is unknown.
    """

    smallest: int = 10
    largest: int = 99
    operators: str = "+-"

    def __post_init__(self) -> None:
        if not 0 <= self.smallest <= self.largest < 1000:
            raise DataError(f"operands from {self.smallest} to {self.largest}: allowed is 0 to 999, in order")
        if not self.operators or set(self.operators) - set(OPERATORS):
            raise DataError(
                f"operators {self.operators!r}: allowed are characters out of {''.join(OPERATORS)!r}"
            )

    def problems(self) -> Iterator[Problem]:
        """Every problem once: a sum and its swapped twin are one problem."""
        for operator in sorted(set(self.operators)):
            for low in range(self.smallest, self.largest + 1):
                for high in range(low, self.largest + 1):
                    yield Problem("+", low, high) if operator == "+" else Problem("-", high, low)


def number_words(number: int) -> str:
    """A number below 1000 in English words without hyphen or "and", as in "one hundred forty two"."""
    hundreds, rest = divmod(number, 100)
    words = [ONES[hundreds], "hundred"] if hundreds else []
    if rest or not hundreds:
        words += [ONES[rest]] if rest < 20 else [TENS[rest // 10], *([ONES[rest % 10]] if rest % 10 else [])]
    return " ".join(words)


def wording(problem: Problem, form: int) -> str:
    """One of eight ways to write a problem: each operand in digits or words, the operator as sign or word."""
    left = number_words(problem.left) if form & 1 else str(problem.left)
    right = number_words(problem.right) if form & 2 else str(problem.right)
    return f"{left} {OPERATORS[problem.operator][form >> 2 & 1]} {right}"


def generate(
    seed: int, *, train_rows: int, held_out_rows: int, task: ArithmeticTask | None = None
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows `{"prompt": ..., "answer": ...}` to train on and to hold out.

    Invariants: no problem, in whatever wording or order of operands, is on both sides; no prompt occurs
    twice; the rows depend on the arguments alone.

    Args:
        seed: of the choice and the wording.
        train_rows: rows to train on.
        held_out_rows: rows held out, each of another problem.
        task: which problems there are; None takes two-digit sums and differences.

    Returns:
        (train, held_out)

    Raises:
        DataError: the task has too few problems.
    """
    problems = sorted((task or ArithmeticTask()).problems(), key=lambda p: _bits(seed, "order", p))
    held, rest = problems[:held_out_rows], problems[held_out_rows:]
    possible = len(rest) * _FORMS
    if len(held) < held_out_rows or train_rows > possible:
        raise DataError(
            f"{train_rows} rows to train on and {held_out_rows} to hold out are more than {len(problems)} "
            f"problems give: at most {possible} and {len(problems)}"
        )
    rounds = [
        _row(seed, problem, turn) for turn in range(-(-train_rows // max(len(rest), 1))) for problem in rest
    ]
    return rounds[:train_rows], [_row(seed, problem, 0) for problem in held]


def write_arithmetic(
    folder: Path, seed: int, *, train_rows: int, held_out_rows: int, task: ArithmeticTask | None = None
) -> tuple[Path, Path]:
    """Writes `generate`'s rows to train.jsonl and held_out.jsonl.

    Returns:
        (train, held_out), the files.

    Raises:
        DataError: the task has too few problems.
    """
    train, held_out = generate(seed, train_rows=train_rows, held_out_rows=held_out_rows, task=task)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    for file, rows in zip(files, (train, held_out), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files


def _row(seed: int, problem: Problem, turn: int) -> dict[str, str]:
    bits = _bits(seed, "wording", problem)
    form = (bits + turn) % _FORMS
    # Eight turns give eight forms, hence eight different prompts, whichever of them are swapped.
    swapped = problem.operator == "+" and bits >> (8 + form) & 1
    shown = Problem("+", problem.right, problem.left) if swapped else problem
    return {"prompt": wording(shown, form), "answer": str(problem.answer)}


def _bits(seed: int, purpose: str, problem: Problem) -> int:
    return hash_bits(f"{seed} {purpose} {problem.operator} {problem.left} {problem.right}")


def hash_bits(text: str) -> int:
    """64 bits that follow from a text, the same on every machine: the first of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
