"""Contract: the log-probs that come with the tokens."""

from dataclasses import replace

import pytest
import torch


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
    assert gap(models.load(), requests, completions) < harness.tolerance


def test_a_head_is_rotated_as_far_as_the_checkpoint_states(harness, models, mixed, gap):
    half = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    completions = harness.generate(mixed, models.get(rope_parameters=half))
    # A quarter instead gives 0.2.
    assert gap(models.load(rope_parameters=half), mixed, completions) < harness.tolerance


def test_logprobs_do_not_depend_on_padding(harness, mixed):
    together = harness.generate(mixed)
    for request, completion in list(zip(mixed, together, strict=True))[::4]:
        (alone,) = harness.generate([request])
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=harness.tolerance)


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
    assert gap(models.load(), requests, completions) < harness.tolerance


def test_a_model_with_its_own_head(harness, models, mixed, gap):
    completions = harness.generate(mixed, models.get(tied=False))
    assert gap(models.load(tied=False), mixed, completions) < harness.tolerance


def test_every_token_has_a_logprob_and_a_version(harness, mixed):
    for completion in harness.generate(mixed):
        assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)
        assert set(completion.versions) == {0}
        assert all(value <= 0 for value in completion.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_top_logprobs_and_those_of_given_ids(harness, models, ask, reference, temperature):
    base = ask("a", (3, 1, 4), temperature=temperature, max_new_tokens=6, top_k=5)
    request = replace(base, top_logprobs=4, logprob_ids=(39, 0, 7))
    plain, asked = harness.generate([base, replace(request, id="b")])
    assert (plain.top_logprobs, plain.id_logprobs) == ((), ())
    assert asked.token_ids == plain.token_ids
    table = reference(models.load(), (3, 1, 4, *asked.token_ids), 3, temperature or 1.0)
    assert len(asked.top_logprobs) == len(asked.id_logprobs) == 6
    for place in range(6):
        best = table[place].topk(4)
        ids, values = zip(*asked.top_logprobs[place], strict=True)
        assert list(ids) == best.indices.tolist()
        assert values == pytest.approx(best.values.tolist(), abs=harness.tolerance)
        given = table[place][torch.tensor([39, 0, 7])].tolist()
        assert asked.id_logprobs[place] == pytest.approx(given, abs=harness.tolerance)
