"""Checkpoints with another number of MTP layers than the model: refused, or made to fit as asked."""

import json
import math

import pytest
import torch
from relax_bridge import (
    Checkpoint,
    CoverageError,
    Layout,
    MtpMismatchError,
    adapt_mtp,
    import_shards,
    model_map,
    write_checkpoint,
)


def adapted(source, layers, **options):
    table = model_map(source.config, names=source.names, mtp_layers=layers)
    return table, adapt_mtp(source, table, **options)


def test_the_numbers_must_agree_by_default(make, tiny_config):
    source = make(tiny_config())
    with pytest.raises(
        MtpMismatchError, match=r"holds 1 MTP layers and the model has 3(.|\n)*mtp\.init: copy"
    ):
        adapted(source, 3)
    _table, same = adapted(source, 1, init="copy")
    assert same is source, "nothing to do"


def test_copy_repeats_the_layers_there_are(make, tiny_config):
    source = make(tiny_config(mtp_num_hidden_layers=2))
    table, view = adapted(source, 5, init="copy")
    there = dict(table.import_tensors(view))
    for added, origin in ((2, 0), (3, 1), (4, 0)):
        inside = [n for n in there if n.startswith(f"mtp.layers.{origin}.")]
        assert len(inside) == 12
        for name in inside:
            copied = name.replace(f"layers.{origin}", f"layers.{added}", 1)
            assert torch.equal(there[copied], there[name]), copied
    assert torch.equal(there["mtp.layers.3.eh_proj.weight"], source.tensor("mtp.layers.1.fc.weight"))
    assert torch.equal(there["mtp.layers.4.eh_proj.weight"], source.tensor("mtp.fc.weight"))


def test_truncate_keeps_the_first_layers(make, tiny_config):
    source = make(tiny_config(mtp_num_hidden_layers=3))
    table, view = adapted(source, 1, init="truncate")
    there = dict(table.import_tensors(view))
    assert torch.equal(there["mtp.layers.0.eh_proj.weight"], source.tensor("mtp.fc.weight"))
    assert not any(name.startswith("mtp.layers.1") for name in there)
    none, bare = adapted(source, 0, init="truncate")
    assert not any(name.startswith("mtp.") for name in dict(none.import_tensors(bare)))


def test_truncate_does_not_hide_what_no_layer_has(make, tiny_config):
    odd = "mtp.layers.0.mlp.unknown.weight"
    source = make(
        tiny_config(mtp_num_hidden_layers=2), edit=lambda tensors: tensors.update({odd: torch.ones(1)})
    )
    table, view = adapted(source, 1, init="truncate")
    with pytest.raises(CoverageError, match=odd):
        table.import_tensors(view)


def test_random_draws_matrices_with_the_given_std_and_zero_norms(make, tiny_config):
    source = make(tiny_config(mtp_num_hidden_layers=1, hidden_size=64))
    table, view = adapted(source, 2, init="random", std=0.5, seed=3)
    there = dict(table.import_tensors(view))
    drawn = there["mtp.layers.1.eh_proj.weight"].float()
    assert drawn.std().item() == pytest.approx(0.5, rel=0.05)
    assert drawn.mean().abs() < 0.05
    assert not there["mtp.layers.1.enorm.weight"].any(), "a zero-centred norm starts at zero"
    assert there["mtp.layers.1.enorm.weight"].dtype == torch.bfloat16
    assert torch.equal(there["mtp.layers.0.eh_proj.weight"], source.tensor("mtp.fc.weight"))
    again = dict(table.import_tensors(adapted(source, 2, init="random", std=0.5, seed=3)[1]))
    other = dict(table.import_tensors(adapted(source, 2, init="random", std=0.5, seed=4)[1]))
    name = "mtp.layers.1.transformer_layer.mlp.linear_fc1.weight"
    assert torch.equal(there[name], again[name])
    assert not torch.equal(there[name], other[name])
    gate, up = there[name].chunk(2)
    assert not torch.equal(gate, up), "every tensor has numbers of its own"


@pytest.mark.parametrize("init", ["random", "copy"])
@pytest.mark.parametrize("kind", ["dense", "moe", "packed"])
def test_every_layout_gets_the_same_layers(make, tiny_config, moe_config, init, kind):
    packed = ["mtp.layers.0.mlp.experts.gate_up_proj"] if kind == "packed" else None
    config = tiny_config() if kind == "dense" else moe_config(num_experts=4)
    source = make(config, names=packed)
    table, view = adapted(source, 2, init=init, std=0.1)
    whole = dict(table.import_tensors(view))
    assert len(whole) == len(table.entries)
    layout = Layout(tensor=2, pipeline=2, expert=2, expert_tensor=1)
    for rank in range(4):
        at = layout.position(rank)
        for shard, tensor in import_shards(table, view, layout=layout, rank=rank):
            entry = shard.entry
            ranks = (at.tensor, 2) if entry.expert is None else (at.expert_tensor, 1)
            assert torch.equal(tensor, entry.partition.shard(whole[entry.megatron], *ranks)), shard.name


@pytest.mark.parametrize(
    ("stored", "wanted", "options", "message"),
    [
        (1, 2, {"init": "truncate"}, "truncate cannot make one of the other; choose copy or random"),
        (2, 1, {"init": "copy"}, "copy cannot make one of the other; choose truncate"),
        (2, 1, {"init": "random", "std": 0.1}, "random cannot make .*; choose truncate"),
        (0, 1, {"init": "copy"}, "copy needs a layer to copy; choose random"),
        (0, 1, {"init": "random"}, "random needs a finite std above 0"),
        (0, 1, {"init": "random", "std": math.nan}, "random needs a finite std above 0"),
        (0, 1, {"init": "random", "std": math.inf}, "random needs a finite std above 0"),
    ],
)
def test_choices_that_cannot_help_name_both_numbers_and_what_can(
    make, tiny_config, stored, wanted, options, message
):
    source = make(tiny_config(mtp_num_hidden_layers=stored))
    with pytest.raises(
        MtpMismatchError, match=f"holds {stored} MTP layers and the model has {wanted}: mtp.init {message}"
    ):
        adapted(source, wanted, **options)


def test_a_directory_without_weights_gets_its_config_alone(make, tiny_config):
    source = make(tiny_config())
    (source.path / "model.safetensors").unlink()
    bare = Checkpoint.open(source.path, weights=False)
    _, view = adapted(bare, 3)
    assert (view.names, view.config["mtp_num_hidden_layers"], view.config_changed) == ((), 3, True)
    assert adapted(bare, 1)[1] is bare


@pytest.mark.parametrize("nested", [False, True])
def test_an_export_with_more_layers_says_so_in_its_config(make, tiny_config, tmp_path, nested):
    config = tiny_config(mtp_num_hidden_layers=0)
    if nested:
        config = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": config}
    source = make(config)
    table, view = adapted(source, 2, init="random", std=0.1)
    trained = dict(table.import_tensors(view))
    out = write_checkpoint(tmp_path / "out", table.export_tensors(trained, like=view), like=view)
    again = Checkpoint.open(out)
    assert model_map(again.config, names=again.names).mtp_layers == 2
    assert dict(model_map(again.config, names=again.names).import_tensors(again)).keys() == trained.keys()
    text = json.loads((out / "config.json").read_text())
    assert (text["text_config"] if nested else text)["mtp_num_hidden_layers"] == 2
