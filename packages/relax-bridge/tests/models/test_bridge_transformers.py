"""The tables against transformers' own classes: names, shapes, what it saves, what it loads, its logits."""

import collections
import functools
import itertools
import json

import pytest
import torch
from relax_bridge import (
    Checkpoint,
    ConfigError,
    Layout,
    MtpMismatchError,
    Placement,
    model_map,
    write_checkpoint,
)
from relax_bridge.models.published import OTHERS, PUBLISHED
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", minversion="5.12")

# Of one published MTP layer: what follows `mtp.` in a name, and its shape (letters: `mtp_shapes`).
MTP = {
    "fc.weight": "H,2H",
    "pre_fc_norm_embedding.weight": "H",
    "pre_fc_norm_hidden.weight": "H",
    "norm.weight": "H",
    "layers.0.input_layernorm.weight": "H",
    "layers.0.post_attention_layernorm.weight": "H",
    "layers.0.self_attn.q_proj.weight": "2*A*D,H",
    "layers.0.self_attn.k_proj.weight": "G*D,H",
    "layers.0.self_attn.v_proj.weight": "G*D,H",
    "layers.0.self_attn.o_proj.weight": "H,A*D",
    "layers.0.self_attn.q_norm.weight": "D",
    "layers.0.self_attn.k_norm.weight": "D",
}
MTP_DENSE = MTP | {
    "layers.0.mlp.gate_proj.weight": "F,H",
    "layers.0.mlp.up_proj.weight": "F,H",
    "layers.0.mlp.down_proj.weight": "H,F",
}
MTP_MOE = MTP | {
    "layers.0.mlp.gate.weight": "E,H",
    "layers.0.mlp.shared_expert.gate_proj.weight": "S,H",
    "layers.0.mlp.shared_expert.up_proj.weight": "S,H",
    "layers.0.mlp.shared_expert.down_proj.weight": "H,S",
    "layers.0.mlp.shared_expert_gate.weight": "1,H",
}
MTP_EXPERT = {"gate_proj.weight": "M,H", "up_proj.weight": "M,H", "down_proj.weight": "H,M"}


def mtp_shapes(config):
    text = config["text_config"]
    letters = {
        "H": text["hidden_size"],
        "A": text["num_attention_heads"],
        "G": text["num_key_value_heads"],
        "D": text["head_dim"],
        "F": text.get("intermediate_size"),
        "E": text.get("num_experts"),
        "S": text.get("shared_expert_intermediate_size"),
        "M": text.get("moe_intermediate_size"),
    }

    def shape(text):
        return tuple(eval(axis.replace("2H", "2*H"), letters) for axis in text.split(","))

    if "num_experts" not in text:
        return {f"mtp.{name}": shape(axes) for name, axes in MTP_DENSE.items()}
    out = {f"mtp.{name}": shape(axes) for name, axes in MTP_MOE.items()}
    for expert in range(text["num_experts"]):
        out |= {f"mtp.layers.0.mlp.experts.{expert}.{name}": shape(axes) for name, axes in MTP_EXPERT.items()}
    return out


def class_shapes(cls, config):
    with torch.device("meta"):
        return {name: tuple(x.shape) for name, x in cls(config).state_dict().items()}


@functools.cache
def published_shapes(size):
    """Names and shapes of a released checkpoint without its tower, from transformers and the published
    `mtp.*`."""
    config = PUBLISHED[size]
    moe = config["model_type"].endswith("moe")
    text_config = transformers.Qwen3_5MoeTextConfig if moe else transformers.Qwen3_5TextConfig
    cls = transformers.Qwen3_5MoeForCausalLM if moe else transformers.Qwen3_5ForCausalLM
    text = text_config(**config["text_config"], tie_word_embeddings=config["tie_word_embeddings"])
    want = class_shapes(cls, text)
    if config["tie_word_embeddings"]:
        del want["lm_head.weight"]  # an alias of the embedding, which no checkpoint stores
    # Published checkpoints are vision-language ones: the text model sits one level deeper.
    want = {name.replace("model.", "model.language_model.", 1): shape for name, shape in want.items()}
    return want | mtp_shapes(config)


@pytest.mark.parametrize("size", PUBLISHED)
def test_names_and_shapes_of_every_published_size_are_those_of_transformers(size):
    assert model_map(PUBLISHED[size]).hf_shapes() == published_shapes(size)


def with_depths(shapes, depths):
    """The same with another number of MTP layers: none, or a second one under names of its own."""
    trunk = {name: shape for name, shape in shapes.items() if not name.startswith("mtp.")}
    first = {name: shape for name, shape in shapes.items() if name.startswith("mtp.")}
    second = {
        "mtp.layers.1." + name.removeprefix("mtp.").removeprefix("layers.0."): s for name, s in first.items()
    }
    return trunk | (first if depths else {}) | (second if depths > 1 else {})


def grid(moe):
    sizes = itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 8) if moe else (1,))
    return [Layout(tensor=t, pipeline=p, expert=e, expert_tensor=1 if moe else None) for t, p, e in sizes]


@pytest.mark.parametrize("depths", [0, 1, 2])
@pytest.mark.parametrize(
    "size", [pytest.param(s, marks=[pytest.mark.slow] if "-A" in s else []) for s in PUBLISHED]
)
def test_every_stored_row_of_every_size_has_one_sender_and_an_owner_in_every_layout(size, depths):
    """Per layout: the rows that ranks export cover each published tensor exactly once, and who exports a
    tensor holds it. Tensors of a row share their cuts, so rows are counted once a row of the table and ranks
    once a tensor."""
    moe = "num_experts" in PUBLISHED[size]["text_config"]
    table = model_map(PUBLISHED[size], mtp_layers=depths)
    assert table.hf_shapes() == with_depths(published_shapes(size), depths)
    for layout in grid(moe):
        placement = Placement(table, layout)
        counted = set()
        senders = collections.defaultdict(set)
        for entry in table.entries:
            sources = placement.sources(entry)
            for rank, _ in sources:
                senders[rank].add(entry.megatron)
            if id(entry.row) not in counted:
                counted.add(id(entry.row))
                for part, shape in enumerate(entry.part_shapes):
                    axis = sources[0][1].axis
                    pieces = sorted(
                        (piece.start, piece.size)
                        for _, cutting in sources
                        for piece in cutting.sends
                        if piece.part == part
                    )
                    ends = list(itertools.accumulate(size for _, size in pieces))
                    assert [start for start, _ in pieces] == [0, *ends[:-1]], (layout, entry.megatron)
                    assert ends[-1] == shape[axis], (layout, entry.megatron)
        # Every rank of a dense model; the first, one in between and the last of those with many experts.
        world = layout.world_size
        for rank in {0, world // 2, world - 1} if moe else range(world):
            shards = placement.shards(rank)
            assert len({(shard.chunk, shard.name) for shard in shards}) == len(shards)
            held = {shard.entry.megatron for shard in shards}
            assert senders[rank] <= held
        assert set().union(*senders.values()) == {entry.megatron for entry in table.entries}


@pytest.mark.parametrize("size", OTHERS)
def test_names_and_shapes_of_the_other_models_are_those_of_transformers(size):
    config = OTHERS[size]
    kind = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next"}[config["model_type"]]
    facts = {key: value for key, value in config.items() if not key.startswith("mtp")}
    want = class_shapes(
        getattr(transformers, kind + "ForCausalLM"), getattr(transformers, kind + "Config")(**facts)
    )
    assert model_map(config, names=want, mtp_layers=0).hf_shapes() == want


def test_the_27b_text_model_has_the_851_tensors_that_others_count():
    names = model_map(PUBLISHED["Qwen3.5-27B"]).hf_shapes()
    assert sum(not name.startswith("mtp.") for name in names) == 851


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_vision_class_differs_by_its_tower_alone(kind):
    config_class = getattr(transformers, kind + "Config")
    config = config_class(text_config={"num_hidden_layers": 4}, vision_config={"depth": 2})
    want = class_shapes(getattr(transformers, kind + "ForConditionalGeneration"), config)
    the_map = model_map(json.loads(config.to_json_string(use_diff=False)))
    tower = {name for name in want if the_map.passes_through(name)}
    assert the_map.hf_shapes() == {name: shape for name, shape in want.items() if name not in tower}
    assert tower
    assert all(name.startswith("model.visual.") for name in tower)
    whole = model_map(json.loads(config.to_json_string(use_diff=False)), vision=True)
    assert whole.hf_shapes() == want
    assert not any(whole.passes_through(name) for name in want)
    placed = Placement(whole, Layout(tensor=2, pipeline=2))
    there = {shard.name for rank in (0, 1) for shard in placed.shards(rank) if "visual" in shard.name}
    assert there == {name.removeprefix("model.") for name in tower}
    assert not any("visual" in shard.name for rank in (2, 3) for shard in placed.shards(rank))


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3Moe", "Qwen3Next", "Qwen3_5Moe"])
@pytest.mark.parametrize("saved", [False, True])
def test_the_other_tables_fit_the_classes_and_what_they_save(kind, saved, tmp_path):
    sizes = {
        "vocab_size": 30,
        "hidden_size": 16,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 6,
        "shared_expert_intermediate_size": 10,
        "intermediate_size": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
    }
    if kind in ("Qwen3Moe", "Qwen3Next"):
        sizes |= {"mlp_only_layers": [0], "decoder_sparse_step": 2}
    name = kind + "TextConfig" if "3_5" in kind else kind + "Config"
    config = getattr(transformers, name)(**sizes)
    model_class = getattr(transformers, kind + "ForCausalLM")
    if not saved:
        want = class_shapes(model_class, config)
        as_json = json.loads(config.to_json_string(use_diff=False))
        assert model_map(as_json, names=want).hf_shapes() == want
        return
    model_class(config).save_pretrained(tmp_path)
    source = Checkpoint.open(tmp_path)
    the_map = model_map(source.config, names=source.names)
    back = dict(the_map.export_tensors(the_map.import_tensors(source)))
    assert back.keys() == set(source.names)
    assert all(torch.equal(x, source.tensor(name)) for name, x in back.items())


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def saved(request, tmp_path, tiny_config):
    """A random Qwen3_5ForCausalLM as transformers saves it in shards, the published mtp.* added by hand."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**tiny_config(tie_word_embeddings=request.param))
    model = transformers.Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    path = tmp_path / "saved"
    model.save_pretrained(path, max_shard_size="8KB")
    shapes = mtp_shapes({"text_config": config.to_dict()})
    mtp = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(mtp, path / "mtp.safetensors", metadata={"format": "pt"})
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(mtp, "mtp.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return model.eval(), Checkpoint.open(path)


def test_our_export_gives_transformers_the_same_logits_and_the_same_files(saved, tmp_path):
    model, source = saved
    the_map = model_map(source.config, names=source.names)
    assert the_map.mtp_layers == 1
    there = dict(the_map.import_tensors(source))
    out = write_checkpoint(tmp_path / "out", the_map.export_tensors(there), like=source)
    for file in (*source.files, "config.json", "generation_config.json"):
        assert (out / file).read_bytes() == (source.path / file).read_bytes()
    loaded = transformers.Qwen3_5ForCausalLM.from_pretrained(out).eval()
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_changed_weight_arrives_in_transformers_and_nothing_else_moves(saved, tmp_path):
    model, source = saved
    the_map = model_map(source.config)
    there = dict(the_map.import_tensors(source))
    # Row 0 of the third head's gate, counted in Megatron's layout: group 1 starts at row 48 with two query
    # heads of 8 rows, then the gates. In q_proj: head 2 starts at row 32 with 8 query rows, then the gate.
    there["decoder.layers.1.self_attention.linear_qkv.weight"][48 + 16] += 1
    out = write_checkpoint(tmp_path / "out", the_map.export_tensors(there), like=source)
    loaded = transformers.Qwen3_5ForCausalLM.from_pretrained(out)
    moved = {
        name: (x != model.state_dict()[name]).nonzero()[:, 0].unique().tolist()
        for name, x in loaded.state_dict().items()
        if not torch.equal(x, model.state_dict()[name])
    }
    assert moved == {"model.layers.1.self_attn.q_proj.weight": [40]}


def test_a_text_model_and_a_table_without_a_tower_refuse_one(tiny_config):
    with pytest.raises(ConfigError, match="it is a text model, without a tower"):
        model_map(tiny_config(), vision=True)
    with pytest.raises(ConfigError, match="the weight map of 'qwen3' has no vision tower"):
        model_map(OTHERS["Qwen3-8B"], vision=True)


def test_a_model_that_transformers_saved_again_has_lost_its_mtp_layer(saved, tmp_path):
    _, source = saved
    transformers.Qwen3_5ForCausalLM.from_pretrained(source.path).save_pretrained(tmp_path / "again")
    again = Checkpoint.open(tmp_path / "again")
    with pytest.raises(MtpMismatchError, match="holds 0 MTP layers and the model has 1"):
        model_map(again.config, names=again.names).import_tensors(again)
    assert dict(model_map(again.config, mtp_layers=0).import_tensors(again))


def test_the_text_part_of_a_vision_checkpoint_loads_and_its_export_stays_one(tmp_path, tiny_config):
    """A vision checkpoint read as text by transformers and saved: names of either kind are understood."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(
        text_config=tiny_config(mtp_num_hidden_layers=0),
        vision_config={
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_heads": 2,
            "out_hidden_size": 16,
            "num_position_embeddings": 4,
        },
    )
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "vl")
    vl = Checkpoint.open(tmp_path / "vl")
    the_map = model_map(vl.config, names=vl.names)
    there = dict(the_map.import_tensors(vl))
    out = write_checkpoint(tmp_path / "out", the_map.export_tensors(there, like=vl), like=vl)
    assert load_file(out / "model.safetensors").keys() == set(vl.names)
    whole = model_map(vl.config, names=vl.names, vision=True)
    held = dict(whole.import_tensors(vl))
    assert held.keys() - there.keys() == {n.removeprefix("model.") for n in vl.names if ".visual." in n}
    held["visual.merger.linear_fc2.bias"] = held["visual.merger.linear_fc2.bias"] + 1
    write_checkpoint(tmp_path / "whole", whole.export_tensors(held, like=vl), like=vl)
    changed = load_file(tmp_path / "whole" / "model.safetensors")
    moved = {name for name in vl.names if not torch.equal(changed[name], vl.tensor(name))}
    assert moved == {"model.visual.merger.linear_fc2.bias"}
    text = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "vl")
    text.save_pretrained(tmp_path / "text")
    saved_text = Checkpoint.open(tmp_path / "text")
    again = dict(model_map(saved_text.config, names=saved_text.names).import_tensors(saved_text))
    assert again.keys() == there.keys()
    assert all(torch.equal(x, again[name]) for name, x in there.items())
