"""Drawing inside SGLang: the embedded engine's numbers, and drafts verified by true rejection sampling."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relax_rollout.engines.sglang.plugin.sampler import accept, settings_of, stream, uniforms, verify
from relax_rollout.seeds import uniforms as embedded


@given(
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(1, 100000), st.integers(0, 100000)), min_size=1)
)
def test_a_seed_gives_the_numbers_of_the_embedded_engine(rows):
    streams = torch.tensor([stream(seed, prompt) for seed, prompt, _ in rows])
    positions = torch.tensor([prompt - 1 + place for _, prompt, place in rows])
    wanted = embedded([seed for seed, _, _ in rows], [place for _, _, place in rows])
    assert torch.equal(uniforms(streams, positions), torch.from_numpy(wanted))


def info(rows, **more):
    fields = {
        "temperatures": torch.ones(rows, 1),
        "top_ps": torch.ones(rows),
        "top_ks": torch.full((rows,), 1 << 30),
        "vocab_size": 5,
        "acc_additive_penalties": None,
        "acc_scaling_penalties": None,
        "logit_bias": None,
    }
    return SimpleNamespace(**(fields | more))


def test_sglangs_settings_are_read():
    got = settings_of(info(2, temperatures=torch.tensor([[1.0], [0.5]]), top_ks=torch.tensor([1, 3])), 2)
    assert got.temperature_N.tolist() == [0.0, 0.0, 0.5, 0.5]
    assert got.top_k_N.tolist() == [1, 1, 3, 3]
    assert settings_of(info(1)).top_k_N.tolist() == [0]


def test_drafts_stand_up_to_the_first_that_differs():
    draft = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3], [9, 0, 2, 3]])
    drawn = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 3], [5, 2, 3, 4], [1, 2, 3, 4]])
    assert accept(draft, drawn).tolist() == [3, 2, 0, 0]


DRAWS = 20000


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperatures": torch.full((DRAWS, 1), 0.6)}, {"top_ks": torch.full((DRAWS,), 3)}],
    ids=["plain", "temperature", "top_k"],
)
def test_whatever_is_drafted_the_outcome_has_the_models_distribution(settings):
    """Chi-square over all outcomes of two verified places on a vocabulary of five."""
    torch.manual_seed(0)
    first, second = torch.randn(5), torch.randn(5, 5)
    likely = int(first.argmax())
    draft = torch.tensor([0, likely, 4]).expand(DRAWS, 3)
    # The logits behind each drafted token are those of a chain: they depend on the token before.
    logits = torch.stack([first.expand(DRAWS, 5), second[draft[:, 1]], second[draft[:, 2]]], 1)
    batch = SimpleNamespace(
        seq_lens=torch.full((DRAWS,), 7),
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        sampling_info=info(DRAWS, **settings),
    )
    batch.sampling_info.sampling_seed = torch.tensor([stream(seed, 7) for seed in range(DRAWS)])
    asked = SimpleNamespace(
        topk=1,
        draft_token_num=3,
        draft_token=draft.reshape(-1),
        max_tree_depth=3,
        positions=(6 + torch.arange(3)).repeat(DRAWS),
    )
    predict, standing, index = verify(asked, batch, SimpleNamespace(next_token_logits=logits.reshape(-1, 5)))
    predict, temperature = predict.view(DRAWS, 3), settings.get("temperatures", torch.ones(1, 1))[0, 0]

    def wanted(row):
        scaled = row / temperature
        if "top_ks" in settings:
            scaled = torch.where(scaled >= scaled.topk(3).values[-1], scaled, -torch.inf)
        return scaled.softmax(-1).double()

    counts = Counter(predict[:, 0].tolist())
    chi2 = sum((counts[t] - DRAWS * p) ** 2 / (DRAWS * p) for t, p in enumerate(wanted(first).tolist()) if p)
    assert all(wanted(first)[token] > 0 for token in counts)
    assert chi2 < 23.5  # upper 1e-4 point with 4 degrees of freedom
    stands = standing > 1
    assert torch.equal(stands, predict[:, 0] == likely)
    after = Counter(predict[stands, 1].tolist())
    total = int(stands.sum())
    chi2 = sum(
        (after[t] - total * p) ** 2 / (total * p) for t, p in enumerate(wanted(second[likely]).tolist()) if p
    )
    assert total > 500
    assert chi2 < 23.5
    for row in range(0, DRAWS, 997):
        count = int(standing[row])
        assert index[row].tolist() == [3 * row + d for d in range(count)] + [-1] * (3 - count)
