"""Contract: requests that no engine can serve are refused before anything is drawn."""

from dataclasses import replace

import pytest
from relax_rollout import InvalidRequestError


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompt": (1, 40)}, "token id 40; the model's vocabulary has 40"),
        ({"stop_token_ids": (41,)}, "token id 41"),
        ({"prompt": (1,) * 500, "max_new_tokens": 13}, "together 513; the model's context is 512"),
    ],
)
def test_what_the_model_cannot_do_is_refused(harness, ask, wrong, words):
    with pytest.raises(InvalidRequestError, match=words):
        harness.generate([ask("good"), ask("bad", **wrong)])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"top_logprobs": 41}, "41 top_logprobs; the model's vocabulary has 40"),
        ({"logprob_ids": (40,)}, "token id 40"),
    ],
)
def test_logprobs_that_the_model_has_not_are_refused(harness, ask, wrong, words):
    with pytest.raises(InvalidRequestError, match=words):
        harness.generate([ask("good"), replace(ask("bad"), **wrong)])


def test_the_longest_allowed_request_is_served(harness, ask):
    (completion,) = harness.generate([ask(prompt=(1,) * 500, max_new_tokens=12)])
    assert len(completion.token_ids) == 12


def test_ids_in_flight_are_unique(harness, ask):
    with pytest.raises(InvalidRequestError, match="'same' is in flight already"):
        harness.generate([ask("same"), ask("same")])


def test_after_a_refusal_the_engine_serves_on(harness, ask):
    async def test(engine):
        with pytest.raises(InvalidRequestError):
            await engine.generate([ask("a"), ask("b", prompt=(99,))])
        return await engine.generate([ask("a")])

    assert harness.run(test)[0].finish_reason == "length"
