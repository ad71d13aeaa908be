"""The law of the loss through the model: packing, padding and micro-batches change neither it nor a gradient.

Axes: T packed positions, S scored ones.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.algorithms import AlgorithmConfig
from relax_core.device import get_device, initialise, seed_all, shutdown
from relax_core.loop.objectives import PolicyObjective, SftObjective
from relax_core.loss import LossReducer
from relax_core.model import MtpConfig, Qwen35Config, build_model
from relax_core.trainer.drafts import draft_denominators
from relax_core.trainer.ranks import Ranks
from relax_core.trainer.sample import MicroBatch, Sample
from relax_core.trainer.trainer import Trainer

JOINED = MtpConfig(detach_embedding=False, detach_trunk=False, detach_head=False)
OBJECTIVES = {
    "sft": SftObjective(AlgorithmConfig(name="sft")),
    "policy": PolicyObjective(
        AlgorithmConfig(name="grpo", kl_loss_coef=0.05, entropy_coef=0.01),
        temperature=0.9,
        max_new_tokens=32,
        on_policy=False,
    ),
}
COLUMNS = ("advantage", "rollout_logprob", "old_logprob", "ref_logprob")


@pytest.fixture(scope="module")
def model(small_config):
    """Two draft layers, in float64: what is left of a difference is round-off."""
    shutdown()
    initialise("cpu", seed=7)
    seed_all(get_device("cpu"), 5)
    sizes = Qwen35Config.from_hf({**small_config, "mtp_num_hidden_layers": 2})
    yield build_model(sizes, mtp=JOINED, dtype=torch.float64)
    shutdown()


def make_samples(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for group, (length, targets) in enumerate(shapes):
        mask_L = torch.zeros(length)
        mask_L[length - min(targets, length - 1) :] = 1
        columns = {name: torch.randn(length, generator=generator) * 0.3 for name in COLUMNS}
        tokens_L = torch.randint(0, 96, (length,), generator=generator)
        made.append(Sample(tokens_L, mask_L, group // 2, columns))
    return made


def loss_and_gradients(model, samples, objective, micro_batches):
    """Of one step; `micro_batches` are (members, padding multiple, length of equal rows or None)."""
    model.zero_grad(set_to_none=True)
    prepared = objective.prepare(samples)
    samples = prepared.samples
    reducer = LossReducer({**prepared.denominators, **draft_denominators(samples, model.mtp_depths)})
    # The trainer's own loss, without its optimizer, which is none of float64's.
    trainer = SimpleNamespace(chunks=[model], mtp=JOINED, ranks=Ranks.here(None))
    total = 0.0
    for members, multiple, row_length in micro_batches:
        batch = MicroBatch.pack(
            samples,
            members,
            torch.device("cpu"),
            pad_to_multiple=multiple,
            draft_depths=model.mtp_depths,
            row_length=row_length,
        )
        hidden_TD = model(batch.tokens_T, batch.layout)
        options = {"batch": batch, "objective": objective, "reducer": reducer, "balance": None}
        options["columns_of"] = lambda batch: batch.columns_S
        loss, _count, _report = Trainer._loss(trainer, hidden_TD, **options)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=6),
    st.sampled_from(sorted(OBJECTIVES)),
    st.data(),
)
def test_packing_padding_and_micro_batches_change_neither_loss_nor_gradient(model, shapes, kind, data):
    samples, objective = make_samples(shapes, len(shapes)), OBJECTIVES[kind]
    everything = list(range(len(samples)))
    wanted, expected = loss_and_gradients(model, samples, objective, [(everything, 1, None)])

    order = data.draw(st.permutations(everything))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=3)))
    longest = max(length for length, _ in shapes)
    micro_batches = [
        (
            order[start:stop],
            data.draw(st.integers(1, 8)),
            data.draw(st.sampled_from((None, longest, longest + 3))),
        )
        for start, stop in pairwise([0, *cuts, len(samples)])
    ]
    got, gradients = loss_and_gradients(model, samples, objective, micro_batches)
    assert got == pytest.approx(wanted, rel=1e-12, abs=1e-13)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-13, msg=name)
