"""Contract: the log-probs that come with the tokens."""

from dataclasses import replace

import pytest

TOLERANCE = {"transformers": 1e-5}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.8, "top_k": 3},
        {"temperature": 0.5, "top_p": 0.5},
        {"temperature": 0.0},
    ],
)
def test_logprobs_are_those_of_a_full_forward_before_truncation(harness, models, mixed, gap, settings):
    requests = [replace(r, sampling=replace(r.sampling, **settings)) for r in mixed]
    completions = harness.generate(requests)
    assert gap(models.load(), requests, completions) < TOLERANCE[harness.name]


def test_logprobs_do_not_depend_on_padding(harness, mixed):
    together = harness.generate(mixed)
    for request, completion in list(zip(mixed, together, strict=True))[::4]:
        (alone,) = harness.generate([request])
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE[harness.name])


def test_mixed_settings_share_a_batch(harness, models, mixed, gap):
    settings = [
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"top_k": 2},
        {"top_p": 0.6},
        {"temperature": 2.0},
        {},
    ]
    requests = [replace(r, sampling=replace(r.sampling, **settings[n % 6])) for n, r in enumerate(mixed)]
    completions = harness.generate(requests)
    assert gap(models.load(), requests, completions) < TOLERANCE[harness.name]


def test_a_model_with_its_own_head(harness, models, mixed, gap):
    completions = harness.generate(mixed, models.get(tied=False))
    assert gap(models.load(tied=False), mixed, completions) < TOLERANCE[harness.name]


def test_every_token_has_a_logprob_and_a_version(harness, mixed):
    for completion in harness.generate(mixed):
        assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)
        assert set(completion.versions) == {0}
        assert all(value <= 0 for value in completion.logprobs)
