import hashlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.data import DataError
from relax_core.data.arithmetic import (
    ArithmeticTask,
    Problem,
    generate,
    number_words,
    wording,
    write_arithmetic,
)

WORDS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
    "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15,
    "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40,
    "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip


def _read_number(text):
    if text.isdigit():
        return int(text)
    total = 0
    for word in text.split():
        total = total * 100 if word == "hundred" else total + WORDS[word]
    return total


def _read_problem(prompt):
    left, operator, right = re.fullmatch(r"(.+) (\+|plus|-|minus) (.+)", prompt).groups()
    return _read_number(left), "+" if operator in ("+", "plus") else "-", _read_number(right)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"), (7, "seven"), (10, "ten"), (14, "fourteen"), (20, "twenty"), (42, "forty two"),
        (99, "ninety nine"), (100, "one hundred"), (305, "three hundred five"),
        (999, "nine hundred ninety nine"),
    ],
)  # fmt: skip
def test_numbers_in_words(number, words):
    assert number_words(number) == words


def test_every_number_reads_back():
    assert [_read_number(number_words(n)) for n in range(1000)] == list(range(1000))


def test_the_eight_wordings_of_a_problem():
    assert [wording(Problem("-", 42, 17), form) for form in range(8)] == [
        "42 - 17", "forty two - 17", "42 - seventeen", "forty two - seventeen",
        "42 minus 17", "forty two minus 17", "42 minus seventeen", "forty two minus seventeen",
    ]  # fmt: skip


def _problem_key(row):
    left, operator, right = _read_problem(row["prompt"])
    return (operator, *(sorted((left, right)) if operator == "+" else (left, right)))


@settings(deadline=None)
@given(seed=st.integers(0, 1000), train_rows=st.integers(1, 400), held_out_rows=st.integers(1, 20))
def test_answers_are_right_prompts_differ_and_no_problem_is_on_both_sides(seed, train_rows, held_out_rows):
    task = ArithmeticTask(smallest=8, largest=17)  # 2 x 55 problems, so that train goes round several times
    train, held_out = generate(seed, train_rows=train_rows, held_out_rows=held_out_rows, task=task)
    assert (len(train), len(held_out)) == (train_rows, held_out_rows)
    for row in (*train, *held_out):
        left, operator, right = _read_problem(row["prompt"])
        assert int(row["answer"]) == (left + right if operator == "+" else left - right) >= 0
        assert 8 <= min(left, right) <= max(left, right) <= 17
    prompts = [row["prompt"] for row in (*train, *held_out)]
    assert len(set(prompts)) == len(prompts)
    assert not {_problem_key(row) for row in train} & {_problem_key(row) for row in held_out}


def test_operators_digits_and_words_are_all_common():
    train, held_out = generate(3, train_rows=2000, held_out_rows=300)
    for rows in (train, held_out):
        prompts = [row["prompt"] for row in rows]
        for part in (" + ", " - ", " plus ", " minus "):
            assert 0.2 < sum(part in prompt for prompt in prompts) / len(prompts) < 0.3
        mixed = sum(
            bool(re.search(r"\d", p)) and bool(re.search(r"ty|teen|ten|eleven|twelve", p)) for p in prompts
        )
        assert 0.4 < mixed / len(prompts) < 0.6
    swapped = [row for row in train if (p := _read_problem(row["prompt"]))[1] == "+" and p[0] > p[2]]
    assert 0.2 < len(swapped) / len(train) < 0.3


def test_files_are_the_same_bytes_everywhere_and_seeds_differ(tmp_path):
    train, held_out = write_arithmetic(tmp_path / "task", 0, train_rows=50, held_out_rows=5)
    digest = hashlib.sha256(train.read_bytes() + held_out.read_bytes()).hexdigest()
    assert digest == "781e04b19ac53125330af8cda046bbd7ff113a72fa5b024eda96c9aa702c3546"
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    assert rows == generate(0, train_rows=50, held_out_rows=5)[0]
    assert rows != generate(1, train_rows=50, held_out_rows=5)[0]


def test_more_training_rows_only_add_and_leave_the_held_out_alone():
    few, held_out = generate(0, train_rows=100, held_out_rows=20)
    many, same = generate(0, train_rows=20_000, held_out_rows=20)
    assert many[:100] == few
    assert same == held_out


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: ArithmeticTask(smallest=5, largest=4), "operands from 5 to 4: allowed is 0 to 999"),
        (lambda: ArithmeticTask(largest=1000), "operands from 10 to 1000"),
        (lambda: ArithmeticTask(operators="+*"), r"operators '\+\*': allowed"),
        (
            lambda: generate(0, train_rows=17, held_out_rows=1, task=ArithmeticTask(1, 2, "+")),
            "more than 3 problems give: at most 16 and 3",
        ),
        (
            lambda: generate(0, train_rows=1, held_out_rows=4, task=ArithmeticTask(1, 2, "+")),
            "more than 3 problems",
        ),
    ],
)
def test_what_the_task_cannot_give_is_refused(action, message):
    with pytest.raises(DataError, match=message):
        action()
