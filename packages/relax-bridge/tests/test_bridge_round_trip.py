"""Import and export of one rank: refusals by name, order, dtypes, bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_bridge import CoverageError, MtpMismatchError, model_map, write_checkpoint


def test_a_round_trip_returns_the_very_bytes(tiny, tmp_path):
    the_map = model_map(tiny.config)
    there = dict(the_map.import_tensors(tiny))
    out = write_checkpoint(tmp_path / "out", the_map.export_tensors(there), like=tiny)
    for file in tiny.files:
        assert (out / file).read_bytes() == (tiny.path / file).read_bytes()


def test_the_stream_is_in_table_order_layer_by_layer(tiny):
    names = [name for name, _ in model_map(tiny.config).import_tensors(tiny)]
    assert names == list(model_map(tiny.config).megatron_shapes())
    layers = [int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")]
    assert layers == sorted(layers)
    assert names[0] == "embedding.word_embeddings.weight"


def test_fused_tensors_hold_the_rows_of_their_parts(tiny):
    there = dict(model_map(tiny.config).import_tensors(tiny))
    in_proj = there["decoder.layers.0.self_attention.in_proj.weight"]
    at = "model.layers.0.linear_attn.in_proj_"
    # q 8, k 8, v 24, z 24, b 4, a 4 rows
    assert torch.equal(in_proj[:40], tiny.tensor(at + "qkv.weight"))
    assert torch.equal(in_proj[40:64], tiny.tensor(at + "z.weight"))
    assert torch.equal(in_proj[64:68], tiny.tensor(at + "b.weight"))
    assert torch.equal(in_proj[68:], tiny.tensor(at + "a.weight"))
    fc1 = there["decoder.layers.3.mlp.linear_fc1.weight"]
    assert torch.equal(fc1[:24], tiny.tensor("model.layers.3.mlp.gate_proj.weight"))
    assert torch.equal(there["mtp.layers.0.eh_proj.weight"], tiny.tensor("mtp.fc.weight"))


def test_a_log_stays_float32_beside_bfloat16(tiny):
    there = dict(model_map(tiny.config).import_tensors(tiny))
    assert there["decoder.layers.0.self_attention.A_log"].dtype == torch.float32
    assert there["decoder.layers.0.self_attention.in_proj.weight"].dtype == torch.bfloat16


def test_export_casts_to_the_dtypes_of_the_source(tiny):
    the_map = model_map(tiny.config)
    masters = {name: x.float() for name, x in the_map.import_tensors(tiny)}
    assert {x.dtype for _, x in the_map.export_tensors(masters)} == {torch.float32}
    for name, x in the_map.export_tensors(masters, like=tiny):
        assert torch.equal(x, tiny.tensor(name))
        assert x.dtype == tiny.dtype(name)


def test_all_that_is_wrong_with_a_checkpoint_is_named_at_once(make, tiny_config):
    def spoil(tensors):
        del tensors["model.layers.1.self_attn.q_norm.weight"]
        tensors["model.layers.1.self_attn.q_scale"] = torch.ones(3)
        tensors["model.norm.weight"] = torch.ones(17)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        tensors["model.layers.0.linear_attn.in_proj_b.weight"] = torch.ones(4, 16)

    source = make(tiny_config(), edit=spoil)
    with pytest.raises(CoverageError) as caught:
        model_map(source.config).import_tensors(source)
    text, problems = str(caught.value), caught.value.problems
    assert problems.missing == ("model.layers.1.self_attn.q_norm.weight",)
    assert problems.extra == ("model.layers.1.self_attn.q_scale",)
    assert problems.mis_shaped == ("model.norm.weight: [17], the table says [16]",)
    assert problems.unsupported[0] == "lm_head.weight: F8_E4M3"
    assert "in_proj_b.weight" in problems.unsupported[1], "parts of one tensor must have one dtype"
    for name in ("q_norm", "q_scale", "[17]", "F8_E4M3", "Dequantise"):
        assert name in text


def test_nothing_is_yielded_before_the_check(make, tiny_config):
    source = make(tiny_config(), edit=lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CoverageError, match=r"model\.norm\.weight"):
        model_map(source.config).import_tensors(source)  # not even iterated


@pytest.mark.parametrize(("wanted", "stored"), [(1, 0), (0, 1), (2, 1), (1, 3)])
def test_another_number_of_mtp_layers_is_refused_with_both_numbers(make, tiny_config, wanted, stored):
    source = make(tiny_config(mtp_num_hidden_layers=stored))
    with pytest.raises(MtpMismatchError, match=f"holds {stored} MTP layers and the model has {wanted}"):
        model_map(source.config, mtp_layers=wanted).import_tensors(source)


def test_several_mtp_layers_each_have_their_own_projection(make, tiny_config):
    source = make(tiny_config(mtp_num_hidden_layers=3))
    there = dict(model_map(source.config).import_tensors(source))
    assert torch.equal(there["mtp.layers.0.eh_proj.weight"], source.tensor("mtp.fc.weight"))
    assert torch.equal(there["mtp.layers.2.eh_proj.weight"], source.tensor("mtp.layers.2.fc.weight"))
    assert torch.equal(
        there["mtp.layers.2.enorm.weight"], source.tensor("mtp.layers.2.pre_fc_norm_embedding.weight")
    )


def test_a_tied_head_has_no_tensor_on_either_side(make, tiny_config):
    source = make(tiny_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in source
    assert "output_layer.weight" not in dict(model_map(source.config).import_tensors(source))


def test_the_top_level_flag_decides_about_tying(tiny_config):
    text = tiny_config(tie_word_embeddings=True)
    untied = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": text}
    assert "lm_head.weight" in model_map(untied).hf_shapes()
    tied = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": tiny_config()}
    assert "lm_head.weight" not in model_map(tied).hf_shapes()


def test_a_vision_tower_is_carried_untouched(make, tiny_config, tmp_path):
    config = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": tiny_config()}
    tower = torch.arange(6.0).half()
    source = make(config, edit=lambda tensors: tensors.update({"model.visual.patch_embed.proj.bias": tower}))
    the_map = model_map(source.config)
    there = dict(the_map.import_tensors(source))
    assert not any("visual" in name for name in there)
    exported = dict(the_map.export_tensors(there, like=source))
    assert torch.equal(exported["model.visual.patch_embed.proj.bias"], tower)
    write_checkpoint(tmp_path / "out", exported, like=source)
    # Without it the export would lose the tower: refused, and the reason says how to carry it.
    with pytest.raises(CoverageError, match=r"patch_embed.proj.bias(.|\n)*like=source"):
        write_checkpoint(tmp_path / "out", the_map.export_tensors(there), like=source)


def test_the_names_decide_about_the_prefix(make, tiny_config):
    text_model = make(tiny_config(), names=["model.language_model.norm.weight"])
    assert "model.language_model.norm.weight" in text_model
    the_map = model_map(text_model.config, names=text_model.names)
    assert len(dict(the_map.import_tensors(text_model))) == len(the_map.megatron_shapes())


def test_an_export_from_a_stream_keeps_table_order_whatever_comes_first(tiny):
    the_map = model_map(tiny.config)
    stream = list(the_map.import_tensors(tiny))
    names = [name for name, _ in the_map.export_tensors(iter(reversed(stream)))]
    assert names == list(the_map.hf_shapes())


def test_an_ordered_stream_is_not_held_back(tiny):
    the_map = model_map(tiny.config)
    taken = []

    def stream():
        for name, x in the_map.import_tensors(tiny):
            taken.append(name)
            yield name, x

    next(iter(the_map.export_tensors(stream())))
    assert taken == ["embedding.word_embeddings.weight"]


@pytest.mark.parametrize("as_stream", [False, True])
def test_what_an_export_lacks_or_has_too_much_is_named(tiny, as_stream):
    the_map = model_map(tiny.config)
    whole = dict(the_map.import_tensors(tiny))

    def export(tensors):
        return list(the_map.export_tensors(iter(tensors.items()) if as_stream else tensors))

    lacking = {k: v for k, v in whole.items() if k != "mtp.layers.0.eh_proj.weight"}
    with pytest.raises(CoverageError, match=r"1 missing:\n  mtp\.layers\.0\.eh_proj\.weight"):
        export(lacking)
    with pytest.raises(CoverageError, match=r"not in the table:\n  lora\.weight"):
        export({"lora.weight": torch.ones(1)} | whole)
    with pytest.raises(CoverageError, match=r"A_log: \[5\], the table says \[4\]"):
        export(whole | {"decoder.layers.0.self_attention.A_log": torch.ones(5)})


def test_a_tensor_given_twice_is_refused(tiny):
    the_map = model_map(tiny.config)
    stream = list(the_map.import_tensors(tiny))
    with pytest.raises(CoverageError, match=r"word_embeddings\.weight: given twice"):
        list(the_map.export_tensors([stream[0], *stream]))


CONFIGS = st.fixed_dictionaries(
    {
        "vocab_size": st.integers(1, 9),
        "hidden_size": st.integers(1, 6),
        "intermediate_size": st.integers(1, 5),
        "num_hidden_layers": st.integers(1, 5),
        "num_key_value_heads": st.integers(1, 3),
        "head_dim": st.integers(1, 4),
        "linear_num_key_heads": st.integers(1, 3),
        "linear_key_head_dim": st.integers(1, 4),
        "linear_value_head_dim": st.integers(1, 4),
        "linear_conv_kernel_dim": st.integers(1, 4),
        "full_attention_interval": st.integers(1, 4),
        "mtp_num_hidden_layers": st.integers(0, 3),
        "tie_word_embeddings": st.booleans(),
        "num_experts": st.integers(1, 3),
        "moe_intermediate_size": st.integers(1, 3),
        "shared_expert_intermediate_size": st.integers(1, 3),
    }
)
KINDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3", "qwen3_moe")


@settings(max_examples=40, deadline=None)
@given(
    sizes=CONFIGS,
    ratio=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    packed=st.booleans(),
    vl=st.booleans(),
)
def test_any_small_model_is_covered_exactly_once_and_returns_bit_for_bit(
    noise, in_memory, sizes, ratio, kind, packed, vl
):
    config = sizes | {
        "model_type": kind,
        "num_attention_heads": ratio * sizes["num_key_value_heads"],
        "linear_num_value_heads": ratio * sizes["linear_num_key_heads"],
    }
    if kind in ("qwen3", "qwen3_moe"):
        del config["mtp_num_hidden_layers"]
    prefix = "model.language_model." if vl else "model."
    names = [prefix + "layers.0.mlp.experts.gate_up_proj" if packed else prefix + "norm.weight"]
    the_map = model_map(config, names=names)
    hf = noise(the_map.hf_shapes())
    held = in_memory(hf)
    there = dict(the_map.import_tensors(held))
    assert {name: tuple(x.shape) for name, x in there.items()} == the_map.megatron_shapes()
    assert sum(x.numel() for x in there.values()) == sum(x.numel() for x in hf.values())
    back = dict(the_map.export_tensors(there))
    assert back.keys() == hf.keys()
    for name, x in hf.items():
        assert torch.equal(x, back[name]), name
    for entry in the_map.entries:
        one = [entry.partition.shard(there[entry.megatron], 0, 1)]
        assert torch.equal(entry.partition.gather(one), there[entry.megatron])
