"""Where the final answer is found."""

import time

import pytest
from relax_rollout.rewards.math.extract import MAX_ANSWER_CHARS, final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{42}$", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed 7", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"3 + 4 = \boxed{7", None),
        (r"\boxed{}", None),
        ("We add.\n#### 1,234", "1,234"),
        ("The answer is 12.5.", "12.5"),
        ("The answer is 12. It is even.", "12"),
        ("the final answer is: $x+1$", "$x+1$"),
        ("Answer: 42 apples", "42"),
        ("**Answer:** 42", "42"),
        ("The answer is 3 + 4 = 7.", "7"),
        ("The answer is 5. No: the answer is 6", "6"),
        ("Answer:", None),
        ("17", "17"),
        ("  -3/4\n", "-3/4"),
        (" 12 + 5 = 17", "17"),
        ("x = 7", "7"),
        ("=17", "17"),
        ("x <= 7", "x <= 7"),
        ("2x + 1", "2x + 1"),
        ("First 3, then 4, and we get 7 of them", "7"),
        ("minus -3.5 then", "-3.5"),
        ("no number at all", None),
        ("", None),
        ("   \n", None),
    ],
)
def test_the_final_answer_is(text, answer):
    assert final_answer(text) == answer


def test_an_endless_answer_is_none():
    assert final_answer(r"\boxed{" + "1" * MAX_ANSWER_CHARS + "}") == "1" * MAX_ANSWER_CHARS
    assert final_answer(r"\boxed{" + "1" * (MAX_ANSWER_CHARS + 1) + "}") is None


@pytest.mark.parametrize(
    "piece",
    [
        r"\boxed{",
        "{",
        "}",
        "answer is ",
        "####",
        "1,",
        "1.",
        "=",
        "\\",
        "$",
        "-",
        "a ",
        "9",
        "\n",
        "answer ",
        " ",
    ],
)
def test_any_text_is_read_in_linear_time(piece):
    started = time.thread_time()
    final_answer(piece * (200_000 // len(piece)))
    final_answer(r"\boxed{" + piece * (200_000 // len(piece)))
    assert time.thread_time() - started < 1.0
