"""PYTORCH_NPU_ALLOC_CONF."""

import pytest
from relax_npu import allocator_problems


@pytest.mark.parametrize(
    "text",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:128",
        "expandable_segments:False,max_split_size_mb:128",
    ],
)
def test_values_that_work(text: str) -> None:
    assert allocator_problems(text) == []


def test_keys_that_exclude_one_another() -> None:
    text = "expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8"
    problems = allocator_problems(text)
    assert [problem.split()[0] for problem in problems] == [
        "max_split_size_mb",
        "garbage_collection_threshold",
    ]


def test_a_key_without_a_value() -> None:
    assert allocator_problems("expandable_segments") == [
        "'expandable_segments' has no value; write expandable_segments:<value>"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("expandable_segments=True", "has no value"),
        (":True", "'' is no key of torch_npu's"),
        (
            "garbage:1",
            "'garbage' is no key of torch_npu's; take one of expandable_segments,",
        ),
        ("expandable_segments:maybe", "expandable_segments:maybe is not True or False"),
        ("expandable_segments:true", "expandable_segments:true is not True or False"),
        ("max_split_size_mb:-5", "is not a whole number"),
        ("garbage_collection_threshold:2", "is not a number between 0 and 1"),
        ("garbage_collection_threshold:x", "is not a number between 0 and 1"),
    ],
)
def test_what_torch_npu_does_not_take(text: str, told: str) -> None:
    (problem,) = allocator_problems(text)
    assert told in problem
    assert "; " in problem


@pytest.mark.parametrize(
    ("text", "count"), [("", 1), ("expandable_segments:True", 1), ("expandable_segments:False", 0)]
)
def test_a_shared_die_needs_the_key_set_to_false(text: str, count: int) -> None:
    assert len(allocator_problems(text, shares_memory=True)) == count
