"""Samples of a pack never see each other, nor the padding."""

import pytest
import torch
from relax_core.model import Qwen35Config, build_model
from relax_core.packing import PackedLayout

LENGTHS = (66, 1, 30, 5)


@pytest.fixture
def model(cpu_world, config_of):
    return build_model(Qwen35Config.from_hf(config_of(mtp_num_hidden_layers=2)))


def outputs(model, layout, tokens_T):
    hidden_TD = model(tokens_T, layout)
    ahead_T = [layout.shift(tokens_T, depth + 1) for depth in range(model.mtp_depths)]
    return [hidden_TD, *model.mtp_hidden(hidden_TD, ahead_T, layout)]


@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_changing_one_sample_leaves_the_others_bit_equal(model, changed):
    layout = PackedLayout.build(LENGTHS, pad_to_multiple=16)
    tokens_T = torch.randint(0, 96, (layout.padded_total,))
    other_T = tokens_T.clone()
    layout.unpack(other_T)[changed].add_(1).remainder_(96)
    for before, after in zip(outputs(model, layout, tokens_T), outputs(model, layout, other_T), strict=True):
        for i, (a, b) in enumerate(zip(layout.unpack(before), layout.unpack(after), strict=True)):
            assert torch.equal(a, b) is (i != changed)


def test_padding_tokens_change_nothing(model):
    layout = PackedLayout.build(LENGTHS, pad_to_multiple=16)
    tokens_T = torch.randint(0, 96, (layout.padded_total,))
    other_T = tokens_T.clone()
    other_T[layout.total :] = 5
    for before, after in zip(outputs(model, layout, tokens_T), outputs(model, layout, other_T), strict=True):
        assert torch.equal(before[: layout.total], after[: layout.total])


def test_a_gradient_of_one_sample_touches_only_its_own_tokens(model):
    layout = PackedLayout.build((4, 3))
    tokens_T = torch.arange(7)
    model(tokens_T, layout)[4:].sum().backward()
    rows = model.embedding.word_embeddings.weight.grad.abs().sum(-1)
    assert rows.nonzero().flatten().tolist() == [4, 5, 6]


def test_the_future_of_a_sample_does_not_reach_its_past(model):
    layout = PackedLayout.build((40,))
    tokens_T = torch.randint(0, 96, (40,))
    other_T = tokens_T.clone()
    other_T[25] = (other_T[25] + 1) % 96
    before, after = model(tokens_T, layout), model(other_T, layout)
    torch.testing.assert_close(before[:25], after[:25], rtol=0, atol=1e-6)
    assert not torch.allclose(before[25:], after[25:], atol=1e-3)
