"""Contract: how tokens are drawn."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

DRAWS = 4000
CHI2_CRITICAL = {19: 50.8, 39: 79.0}
"""Upper 1e-4 points of the chi-square distribution (tables); the draws are seeded, so no test is flaky."""


def chi_square(counts: Counter, probabilities: torch.Tensor) -> float:
    """Pearson's statistic over the tokens, those expected fewer than 5 times pooled."""
    expected = probabilities.double() * DRAWS
    observed = torch.tensor([counts[token] for token in range(len(expected))], dtype=torch.float64)
    rare = expected < 5
    statistic = ((observed - expected)[~rare] ** 2 / expected[~rare]).sum()
    if expected[rare].sum() > 0:
        statistic += (observed[rare].sum() - expected[rare].sum()) ** 2 / expected[rare].sum()
    return float(statistic)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.7}]
)
def test_first_tokens_follow_the_models_distribution(harness, models, ask, reference, settings):
    prompt = (3, 1, 4, 1, 5)
    requests = [ask(str(k), prompt, max_new_tokens=1, seed=k, **settings) for k in range(DRAWS)]
    counts = Counter(completion.token_ids[0] for completion in harness.generate(requests))
    scores = reference(models.load(), (*prompt, 0), len(prompt), settings.get("temperature", 1.0))
    if "top_k" in settings:
        scores = TopKLogitsWarper(settings["top_k"])(None, scores)
    if "top_p" in settings:
        scores = TopPLogitsWarper(settings["top_p"])(None, scores)
    wanted = scores.softmax(-1)[0]
    assert all(wanted[token] > 0 for token in counts)
    assert chi_square(counts, wanted) < CHI2_CRITICAL[39]


def test_second_tokens_follow_the_models_distribution_given_the_first(harness, models, ask, reference):
    prompt = (9, 9)
    requests = [ask(str(k), prompt, max_new_tokens=2, seed=k, top_k=1000) for k in range(DRAWS)]
    pairs = Counter(completion.token_ids for completion in harness.generate(requests))
    first = reference(models.load(), (*prompt, 0), 2).exp()[0]
    joint = torch.stack([first[t] * reference(models.load(), (*prompt, t, 0), 3).exp()[0] for t in range(40)])
    counts = Counter({t1 * 40 + t2: n for (t1, t2), n in pairs.items()})
    degrees = int((joint * DRAWS >= 5).sum())
    assert chi_square(counts, joint.flatten()) < degrees + 4 * (2 * degrees) ** 0.5


def test_greedy_is_what_transformers_generates(harness, models, ask):
    prompts = [(1,), (2, 3), tuple(range(10)), tuple(range(30, 0, -1))]
    requests = [ask(str(n), prompt, temperature=0.0, max_new_tokens=20) for n, prompt in enumerate(prompts)]
    for prompt, completion in zip(prompts, harness.generate(requests), strict=True):
        ids = torch.tensor([prompt])
        wanted = models.load().generate(
            ids, do_sample=False, max_new_tokens=20, attention_mask=torch.ones_like(ids)
        )
        assert completion.token_ids == tuple(wanted[0, len(prompt) :].tolist())


def test_top_k_of_one_is_greedy(harness, ask):
    greedy, cut = harness.generate([ask("a", temperature=0.0), ask("b", temperature=1.3, top_k=1)])
    assert greedy.token_ids == cut.token_ids


def test_a_tiny_top_p_is_greedy(harness, ask):
    greedy, cut = harness.generate([ask("a", temperature=0.0), ask("b", top_p=1e-9)])
    assert greedy.token_ids == cut.token_ids


def test_tokens_depend_on_the_seed_not_on_neighbours_or_order(harness, mixed):
    together = harness.generate(mixed)
    backwards = harness.generate(mixed[::-1])[::-1]
    assert [c.token_ids for c in together] == [c.token_ids for c in backwards]
    alone = harness.run(lambda engine: one_by_one(engine, mixed[::4]))
    assert [c.token_ids for c in together[::4]] == [c.token_ids for c in alone]


async def one_by_one(engine, requests):
    return [(await engine.generate([request]))[0] for request in requests]


def test_a_seed_repeats_and_another_differs(harness, ask):
    a, b, c = harness.generate(
        [ask("a", max_new_tokens=30), ask("b", max_new_tokens=30), ask("c", max_new_tokens=30, seed=1)]
    )
    assert a.token_ids == b.token_ids != c.token_ids


def test_without_a_seed_draws_differ(harness, ask):
    a, b = harness.generate([ask("a", seed=None, max_new_tokens=30), ask("b", seed=None, max_new_tokens=30)])
    assert a.token_ids != b.token_ids


def test_the_same_call_gives_the_same_bits(harness, mixed):
    first, second = harness.generate(mixed), harness.generate(mixed)
    assert first == second


def test_a_completion_ends_with_its_first_stop_token(harness, mixed):
    free = harness.generate(mixed)
    stops = (3, 11, 29)
    stopping = [replace(r, sampling=replace(r.sampling, stop_token_ids=stops)) for r in mixed]
    ended = 0
    for whole, cut in zip(free, harness.generate(stopping), strict=True):
        places = [n for n, token in enumerate(whole.token_ids) if token in stops]
        length = places[0] + 1 if places else len(whole.token_ids)
        assert cut.token_ids == whole.token_ids[:length]
        assert cut.finish_reason == ("stop" if places else "length")
        ended += bool(places)
    assert 0 < ended < len(mixed)


def test_a_stop_token_in_the_last_place_is_a_stop(harness, ask):
    (whole,) = harness.generate([ask("a", max_new_tokens=12)])
    last = next(n for n, token in enumerate(whole.token_ids) if n and token not in whole.token_ids[:n])
    sampling = {"max_new_tokens": last + 1, "stop_token_ids": (whole.token_ids[last],)}
    (cut,) = harness.generate([ask("a", **sampling)])
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[: last + 1], "stop")


def test_each_request_has_its_own_length(harness, ask):
    requests = [ask(str(n), max_new_tokens=n) for n in (1, 2, 9, 40)]
    completions = harness.generate(requests)
    assert [len(c.token_ids) for c in completions] == [1, 2, 9, 40]
    assert {c.finish_reason for c in completions} == {"length"}
    assert completions[3].token_ids[:9] == completions[2].token_ids


def test_answers_come_in_the_requests_order(harness, mixed):
    assert [c.request_id for c in harness.generate(mixed)] == [r.id for r in mixed]


def test_no_requests_no_answers(harness):
    assert harness.generate([]) == []
