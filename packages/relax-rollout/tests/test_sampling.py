"""Drawing from logits, against transformers' own warpers and hand-computed cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_rollout import sampling
from relax_rollout.sampling import SamplingTensors, draw, kept_NV
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper


def settings_of(temperature=1.0, top_p=1.0, top_k=0, rows=1) -> SamplingTensors:
    return SamplingTensors(
        torch.full((rows,), temperature), torch.full((rows,), top_p), torch.full((rows,), top_k)
    )


@given(seed=st.integers(0, 10**6), top_k=st.integers(0, 60), top_p=st.floats(0.01, 1.0))
@settings(max_examples=200, deadline=None)
def test_the_tokens_kept_are_those_of_transformers(seed, top_k, top_p):
    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(seed))
    wanted = logits.clone()
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    got = kept_NV(logits, torch.full((4,), top_k), torch.full((4,), top_p))
    differing = got != wanted.isfinite()
    if differing.any():  # only where a cumulative probability equals top_p to float32 rounding
        mass = (
            logits.masked_fill(~(got | wanted.isfinite()), -torch.inf)
            .softmax(-1)
            .sort(descending=True)
            .values
        )
        assert (mass.cumsum(-1) - top_p).abs().min() < 1e-6
        assert differing.sum() <= 1


def test_ties_at_the_cut_are_all_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert kept_NV(logits, torch.tensor([2]), torch.tensor([1.0])).tolist() == [[True, True, True, False]]
    p = logits.softmax(-1)[0]
    just_over = float(p[0] + 0.5 * p[1])
    assert kept_NV(logits, torch.tensor([0]), torch.tensor([just_over])).tolist() == [
        [True, True, True, False]
    ]


@pytest.mark.parametrize(
    ("uniform", "token"), [(1e-7, 0), (0.24, 0), (0.26, 1), (0.74, 2), (0.76, 3), (1 - 2**-24, 3)]
)
def test_the_cumulative_distribution_is_inverted_in_vocabulary_order(uniform, token):
    logits = torch.log(torch.tensor([[0.25, 0.25, 0.25, 0.25]]))
    token_N, logprob_N = draw(logits, settings_of(), torch.tensor([uniform]))
    assert token_N.tolist() == [token]
    assert logprob_N.item() == pytest.approx(-1.3862944, abs=1e-6)


@pytest.mark.parametrize("uniform", [2.0**-24, 0.5, 1 - 2.0**-24])
def test_a_token_without_mass_is_never_drawn(uniform):
    logits = torch.tensor([[-torch.inf, 0.3, -torch.inf, 0.1, -torch.inf]])
    for cut in (settings_of(), settings_of(top_k=1), settings_of(top_p=0.4)):
        token_N, _ = draw(logits, cut, torch.tensor([uniform]))
        assert token_N.item() in {1, 3}
    assert draw(logits, settings_of(top_k=1), torch.tensor([uniform]))[0].item() == 1


def test_logprobs_are_before_truncation_at_the_temperature():
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    token_N, logprob_N = draw(logits, settings_of(temperature=2.0, top_k=1), torch.tensor([0.5]))
    assert token_N.item() == 2
    wanted = torch.tensor([0.5, 1.0, 2.0]).softmax(0)[2].log()
    assert logprob_N.item() == pytest.approx(wanted.item(), abs=1e-6)


def test_greedy_takes_the_lowest_of_equal_logits_and_reports_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 3.0]])
    token_N, logprob_N = draw(logits, settings_of(temperature=0.0), torch.tensor([0.999]))
    assert token_N.item() == 1
    assert logprob_N.item() == pytest.approx(logits[0].log_softmax(0)[1].item())


def test_rows_keep_their_own_settings():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(3, 1)
    mixed = SamplingTensors(
        torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0, 0, 1])
    )
    token_N, _ = draw(logits, mixed, torch.tensor([0.01, 0.01, 0.01]))
    assert token_N.tolist() == [2, 0, 2]


def test_a_large_vocabulary_is_drawn_from_in_parts(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(7, 50, generator=generator), torch.rand(7, generator=generator)
    mixed = SamplingTensors(torch.linspace(0, 2, 7), torch.linspace(0.3, 1, 7), torch.arange(7))
    whole = draw(logits, mixed, uniform)
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 100)
    parts = draw(logits, mixed, uniform)
    assert torch.equal(whole[0], parts[0])
    torch.testing.assert_close(whole[1], parts[1])


def test_broken_logits_are_visible_in_the_logprob():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    _, logprob_N = draw(logits, settings_of(rows=2), torch.tensor([0.5, 0.5]))
    assert logprob_N.isfinite().tolist() == [False, True]


def test_bfloat16_logits_are_taken_to_float32():
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    token_N, logprob_N = draw(logits, settings_of(rows=2), torch.tensor([0.2, 0.9]))
    assert logprob_N.dtype == torch.float32
    wanted = logits.float().log_softmax(-1).gather(1, token_N[:, None])[:, 0]
    torch.testing.assert_close(logprob_N, wanted)
