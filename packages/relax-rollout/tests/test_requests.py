"""Requests refuse impossible values by name."""

import dataclasses

import pytest
from relax_rollout import InvalidRequestError, Request, SamplingParams


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0; it must be a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1; it must be at least 0"),
        ({"stop_token_ids": (3, -1)}, "a stop token id is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, f"seed is {2**63}; it must be at least 0 and below {2**63}"),
    ],
)
def test_sampling_settings_out_of_range(wrong, words):
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(**({"max_new_tokens": 4} | wrong))


@pytest.mark.parametrize(
    ("id", "prompt", "words"),
    [
        ("", (1,), "an empty id"),
        ("x", (), "request 'x' has an empty prompt"),
        ("x", (1, -2), "a prompt token id of request 'x' is -2"),
        ("x", (1, "a"), "a prompt token id of request 'x' is 'a'"),
        ("x", (True,), "a prompt token id of request 'x' is True"),
    ],
)
def test_requests_that_make_no_sense(id, prompt, words):
    with pytest.raises(InvalidRequestError, match=words):
        Request(id, prompt, SamplingParams(1))


def test_lists_become_tuples_and_nothing_can_be_changed():
    request = Request("a", [1, 2], SamplingParams(1, stop_token_ids=[3]))
    assert request.prompt_ids == (1, 2)
    assert request.sampling.stop_token_ids == (3,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.id = "b"


def test_an_invalid_request_is_a_value_error():
    assert issubclass(InvalidRequestError, ValueError)
