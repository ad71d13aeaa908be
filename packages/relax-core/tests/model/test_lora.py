"""Adapters of a model in one process: what they add up to, and what is trained."""

import pytest
import torch
from relax_bridge import model_map
from relax_core.model import Qwen35Config
from relax_core.model.build import build_chunks
from relax_core.model.linear import adapters_off, is_adapter
from relax_core.model.lora_config import LINEAR, LoraConfig
from relax_core.model.placement import Placement
from relax_core.packing import PackedLayout

LORA = LoraConfig(rank=3, alpha=6.0)
EVERYWHERE = LoraConfig(rank=3, alpha=6.0, targets=(*LINEAR, "experts"))
TOKENS_T = torch.arange(3, 20)
LAYOUT = PackedLayout.build([len(TOKENS_T)])


def build(facts, lora, **options):
    torch.manual_seed(0)
    (model,) = build_chunks(Qwen35Config.from_hf(facts), lora=lora, seed=5, **options)
    return model


def fill(model):
    """Gives B random numbers, so that the adapters count."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@torch.no_grad()
def logits(model):
    return model.logits(model(TOKENS_T, LAYOUT))


@pytest.fixture(params=["dense", "moe"])
def facts_and_lora(request, config_of, moe_config_of):
    return (config_of(), LORA) if request.param == "dense" else (moe_config_of(), EVERYWHERE)


def test_the_merged_weights_are_the_adapted_model(cpu_world, facts_and_lora):
    facts, lora = facts_and_lora
    model = build(facts, lora)
    before = logits(model)
    fill(model)
    adapted = logits(model)
    assert (adapted - before).abs().max() > 0.01
    plain = build(facts, None)
    parts = Placement(model_map(facts)).parts([plain])
    for name, merged in Placement(model_map(facts), lora).whole([model]):
        parts[name].of(parts[name].parameter.data).copy_(merged)
    # float32: B (A x) against (B A) x.
    torch.testing.assert_close(logits(plain), adapted, rtol=1e-4, atol=1e-5)
    with adapters_off([model]):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), adapted)


def test_a_new_adapter_changes_nothing_and_is_drawn_by_its_name(cpu_world, config_of):
    plain, first, again = build(config_of(), None), build(config_of(), LORA), build(config_of(), LORA)
    first.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(logits(first), logits(plain))
    drawn = {n: p for n, p in first.named_parameters() if n.endswith("lora_A")}
    others = dict(again.named_parameters())
    assert all(torch.equal(parameter, others[name]) for name, parameter in drawn.items())
    assert len({tuple(parameter.flatten().tolist()) for parameter in drawn.values()}) == len(drawn)
    # Uniform within 1 / sqrt(inputs): 32 of them.
    qkv = drawn["decoder.layers.3.self_attention.linear_qkv.lora_A"]
    assert 0.8 / 32**0.5 < qkv.abs().max() <= 1 / 32**0.5


def test_adapters_alone_can_be_trained_and_the_draft_layers_have_none(cpu_world, config_of):
    model = build(config_of(mtp_num_hidden_layers=1), LORA)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    # Two matrices of four projections in each of four layers.
    assert len(trained) == 2 * 4 * 4
    assert not any(name.startswith("mtp.") for name in trained)


def test_draft_layers_are_adapted_on_demand_on_the_same_projections(cpu_world, config_of):
    drafts = LoraConfig(rank=3, alpha=6.0, drafts=True)
    model = build(config_of(mtp_num_hidden_layers=2), drafts)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layer = "mtp.layers.1.transformer_layer."
    assert {name for name in trained if name.startswith("mtp.layers.1.")} == {
        f"{layer}{projection}.lora_{matrix}"
        for projection in (
            "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2",
        )
        for matrix in "AB"
    }  # fmt: skip
    facts = config_of(mtp_num_hidden_layers=2)
    assert trained == Placement(model_map(facts), drafts).adapters.keys()
    assert not any(name.startswith("mtp.") for name in Placement(model_map(facts), LORA).adapters)
    fill(model)
    merged = dict(Placement(model_map(facts), drafts).whole([model]))
    name = f"{layer}mlp.linear_fc2"
    down = model.get_submodule(name)
    wanted = down.weight + 2.0 * down.lora_B @ down.lora_A
    torch.testing.assert_close(merged[f"{name}.weight"], wanted)


def test_drafts_that_are_not_there_cannot_be_adapted(cpu_world, config_of):
    with pytest.raises(ValueError, match=r"the model has no draft layers: set lora\.drafts to false"):
        build(config_of(), LoraConfig(rank=2, drafts=True))


def test_only_the_targets_are_adapted(cpu_world, config_of):
    model = build(config_of(), LoraConfig(rank=2, targets=("in_proj", "linear_fc2")))
    modules = {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad}
    assert modules == {"in_proj", "linear_fc2"}


def test_dropout_acts_in_training_alone(cpu_world, config_of):
    model = build(config_of(), LoraConfig(rank=3, dropout=0.5))
    fill(model)
    model.eval()
    assert torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))


@pytest.mark.parametrize(
    ("targets", "words"),
    [(("experts",), "lora.targets has experts, which this model has none of"), (("linear_fc1",), None)],
)
def test_targets_that_the_model_lacks_are_refused(cpu_world, config_of, targets, words):
    lora = LoraConfig(rank=2, targets=targets)
    if words is None:
        build(config_of(), lora)
        return
    with pytest.raises(ValueError, match=words):
        build(config_of(), lora)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha": 16.0}, "alpha has no effect while rank is 0"),
        ({"dropout": 0.1, "alpha": 16.0}, "alpha, dropout have no effect while rank is 0"),
        ({"rank": 2, "targets": ("in_proj", "in_proj")}, "name one twice"),
        ({"rank": 2, "targets": ("q_proj",)}, "linear_qkv"),
        ({"rank": 2, "dropout": 1.0}, "less than 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        LoraConfig(**settings)
