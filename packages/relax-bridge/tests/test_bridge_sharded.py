"""Import into and export from many ranks: only owned bytes are read, and all comes back bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_bridge import (
    BridgeError,
    CoverageError,
    Layout,
    Placement,
    export_buckets,
    export_shards,
    import_shards,
    model_map,
)


@pytest.fixture
def cut(make, tiny_config, import_all):
    """A checkpoint, its table, a layout of two by two ranks, and what each holds."""
    source = make(tiny_config())
    table, layout = model_map(source.config), Layout(tensor=2, pipeline=2)
    return source, table, layout, import_all(table, source, layout)


def test_a_rank_holds_the_partition_of_the_whole(cut):
    source, table, layout, held = cut
    whole = dict(table.import_tensors(source))
    for rank in range(4):
        for shard in Placement(table, layout).shards(rank):
            want = shard.entry.partition.shard(whole[shard.entry.megatron], layout.position(rank).tensor, 2)
            assert torch.equal(held[rank][0][shard.name], want), shard.name


def test_a_rank_reads_what_it_holds_and_no_more(in_memory, noise, tiny_config):
    table = model_map(tiny_config())
    source = in_memory(noise(table.hf_shapes()))
    for rank in range(4):
        source.read = 0
        got = [x for _, x in import_shards(table, source, layout=Layout(tensor=2, pipeline=2), rank=rank)]
        assert source.read == sum(x.numel() for x in got)


def test_unowned_bytes_of_the_file_are_never_needed(cut, tmp_path):
    """The rows of the other rank are overwritten on disk; what this rank reads does not change."""
    source, table, layout, held = cut
    path = source.path / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    keep = bytearray(b"\xff" * len(data))
    for shard in Placement(table, layout).shards(0):
        if shard.cutting.axis == 0:
            for piece in shard.cutting.pieces:
                name = shard.entry.hf[piece.part]
                offset = begin + source._raw("model.safetensors")._begin[name] - begin
                width = source.nbytes(name) // source.shape(name)[0]
                span = slice(offset + piece.start * width, offset + (piece.start + piece.size) * width)
                keep[span] = data[span]
    keep[:begin] = data[:begin]
    path.write_bytes(keep)
    for shard, tensor in import_shards(table, source, layout=layout, rank=0):
        if shard.cutting.axis == 0:
            assert torch.equal(tensor, held[0][0][shard.name]), shard.name


def test_parameters_are_filled_in_place_in_their_own_dtype(cut):
    source, table, layout, held = cut
    parameters = {
        shard.name: torch.nn.Parameter(torch.full(shard.shape, float("nan")))
        for shard in Placement(table, layout).shards(1)
    }
    for shard, tensor in import_shards(
        table, source, layout=layout, rank=1, into=lambda s: parameters[s.name]
    ):
        assert tensor is parameters[shard.name]
    assert all(torch.equal(parameters[name], x.float()) for name, x in held[1][0].items())


def test_a_parameter_of_another_shape_is_named_with_both(cut):
    source, table, layout, _ = cut
    with pytest.raises(BridgeError, match=r"is \[3\]; its share .* is \[25, 16\]"):
        next(import_shards(table, source, layout=layout, into=lambda s: torch.empty(3)))


def test_large_tensors_pass_through_bounded_memory(cut, monkeypatch):
    from relax_bridge import sharded_import

    source, table, layout, held = cut
    monkeypatch.setattr(sharded_import, "_STAGING_BYTES", 100)  # three rows of the embedding
    got = import_shards(table, source, layout=layout, into=lambda s: torch.empty(s.shape))
    assert all(torch.equal(x, held[0][0][shard.name].float()) for shard, x in got)


@pytest.mark.parametrize("to", [0, 3, None])
@pytest.mark.parametrize("bucket_bytes", [1, 700, 10**9])
def test_gathered_buckets_are_the_source_in_order_and_in_size(cut, export_all, to, bucket_bytes):
    source, table, layout, held = cut
    found = export_all(table, held, layout, to=to, bucket_bytes=bucket_bytes, like=source)
    for rank, buckets in enumerate(found):
        if to is not None and rank != to:
            assert buckets == [], "a rank that receives nothing yields nothing"
            continue
        assert [name for bucket in buckets for name in bucket] == list(table.hf_shapes())
        assert all(torch.equal(x, source.tensor(name)) for bucket in buckets for name, x in bucket.items())
        for bucket in buckets:
            assert len(bucket) == 1 or sum(x.nbytes for x in bucket.values()) <= bucket_bytes
    assert len(found[to or 0]) == {1: len(table.hf_shapes()), 10**9: 1}.get(bucket_bytes, len(found[to or 0]))


def test_one_rank_exports_its_own_memory(tiny):
    table = model_map(tiny.config)
    held = dict(table.import_tensors(tiny))
    (bucket,) = [dict(b) for b in export_buckets(table, held, bucket_bytes=10**9)]
    assert list(bucket) == list(table.hf_shapes())
    assert bucket["mtp.fc.weight"].data_ptr() == held["mtp.layers.0.eh_proj.weight"].data_ptr()
    assert all(torch.equal(x, tiny.tensor(name)) for name, x in bucket.items())


def test_parameters_may_go_by_their_names_in_the_whole_model(cut, export_all):
    source, table, layout, held = cut
    placement = Placement(table, layout)
    named = [
        {shard.entry.megatron: held[rank][shard.chunk][shard.name] for shard in placement.shards(rank)}
        for rank in range(4)
    ]
    assert "decoder.layers.3.mlp.linear_fc1.weight" in named[3]
    (bucket,) = export_all(table, named, layout, bucket_bytes=10**9, like=source)[0]
    assert all(torch.equal(x, source.tensor(name)) for name, x in bucket.items())


def test_a_bucket_is_let_go_when_the_next_is_asked_for(tiny):
    table = model_map(tiny.config)
    buckets = export_buckets(table, dict(table.import_tensors(tiny)), bucket_bytes=1)
    first = next(buckets)
    assert first
    next(buckets)
    assert not first


def test_the_next_exchange_is_under_way_while_this_one_is_put_in_place(cut):
    source, table, layout, held = cut
    log = []

    class Watched:
        def receives(self, rank):
            return rank == 1

        def start(self, mine, sizes):
            number = sum(kind == "start" for kind, _ in log)
            log.append(("start", number))

            def wait():
                log.append(("wait", number))
                return [torch.zeros(size, dtype=torch.uint8) for size in sizes]

            return wait

    for _ in export_buckets(
        table, held[1], bucket_bytes=2000, layout=layout, rank=1, exchange=Watched(), like=source
    ):
        pass
    last = max(number for _, number in log)
    assert last > 3
    for number in range(last):
        assert log.index(("start", number + 1)) < log.index(("wait", number))
        assert number == 0 or log.index(("wait", number - 1)) < log.index(("start", number + 1)), (
            "never three"
        )


def test_a_vision_tower_follows_at_the_end(make, tiny_config, import_all, export_all):
    config = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": tiny_config()}
    tower = torch.arange(6.0).half()
    source = make(config, edit=lambda tensors: tensors.update({"model.visual.patch_embed.proj.bias": tower}))
    table, layout = model_map(source.config, names=source.names), Layout(tensor=2)
    first, second = export_all(
        table, import_all(table, source, layout), layout, bucket_bytes=1000, like=source
    )
    assert second == []
    assert torch.equal(first[-1]["model.visual.patch_embed.proj.bias"], tower)


def test_what_a_rank_lacks_or_has_too_much_is_named(cut):
    source, table, layout, held = cut
    chunk = dict(held[0][0])
    gone = chunk.pop("decoder.layers.0.mlp.linear_fc2.weight")
    chunk |= {"lora": gone, "decoder.layers.1.mlp.linear_fc2.weight": torch.ones(2)}
    with pytest.raises(CoverageError, match="tensors of rank 0") as caught:
        export_buckets(table, chunk, bucket_bytes=1, layout=layout, like=source)
    problems = caught.value.problems
    assert problems.missing == ("decoder.layers.0.mlp.linear_fc2.weight",)
    assert problems.extra == ("lora",)
    assert problems.mis_shaped == ("decoder.layers.1.mlp.linear_fc2.weight: [2], this layout says [16, 12]",)


def test_several_ranks_need_an_exchange_and_dtypes(cut, export_all):
    source, table, layout, held = cut
    with pytest.raises(BridgeError, match="a layout of 4 ranks needs an exchange"):
        export_buckets(table, held[0], bucket_bytes=1, layout=layout, like=source)
    with pytest.raises(BridgeError, match=r"needs like=\.\.\. or dtype_of"):
        export_all(table, held, layout, bucket_bytes=1)
    wide = export_all(table, held, layout, bucket_bytes=1, dtype_of=lambda name: torch.float64)
    assert {x.dtype for bucket in wide[0] for x in bucket.values()} == {torch.float64}


def test_an_engine_with_the_same_tensor_size_takes_shares_as_they_are(cut):
    source, table, layout, held = cut
    seen = {}
    for rank in range(4):
        for share in export_shards(table, held[rank], layout=layout, rank=rank, engine=Layout(tensor=2)):
            whole = source.tensor(share.name)
            want = torch.cat([whole.narrow(share.axis, *part) for part in share.ranges], dim=share.axis)
            assert torch.equal(share.tensor, want), share.name
            assert share.shape == tuple(whole.shape)
            seen.setdefault(share.name, []).append(share)
    assert set(seen) == set(source.names)
    # q, k and v of the delta net are cut one by one: rows 0-3, 8-11 and 16-27 on the first rank.
    ranges = [s.ranges for s in seen["model.layers.0.linear_attn.in_proj_qkv.weight"]]
    assert ranges == [((0, 4), (8, 4), (16, 12)), ((4, 4), (12, 4), (28, 12))]
    # The embedding comes from the first stage alone, and without its padding.
    assert [s.ranges for s in seen["model.embed_tokens.weight"]] == [((0, 25),), ((25, 25),)]


def test_an_engine_above_the_number_of_groups_needs_whole_keys(make, tiny_config, import_all):
    source = make(tiny_config(linear_num_key_heads=4))
    table, layout = model_map(source.config), Layout(tensor=4)
    held = import_all(table, source, layout)
    with pytest.raises(BridgeError, match="4 tensor-parallel ranks share the 2 key/value heads"):
        export_shards(table, held[0], layout=layout, rank=0, engine=layout)


def test_packed_experts_are_handed_over_by_their_numbers(make, moe_config, import_all):
    source = make(moe_config(num_experts=4))
    table, layout = model_map(source.config), Layout(expert=2, expert_tensor=1)
    held = import_all(table, source, layout)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for rank in range(2):
        shares = export_shards(table, held[rank], layout=layout, rank=rank, engine=layout)
        (share,) = (share for share in shares if share.name == name)
        assert (share.experts, share.axis) == ((2 * rank, 2), 1)
        assert torch.equal(share.tensor, source.tensor(name)[2 * rank : 2 * rank + 2])


def test_an_engine_that_cuts_otherwise_is_refused_with_both(cut):
    _, table, layout, held = cut
    with pytest.raises(BridgeError, match=r"is \(2, 1, 2\) and \(4, 1, 4\); use export_buckets"):
        export_shards(table, held[0], layout=layout, rank=0, engine=Layout(tensor=4))


@st.composite
def models_and_layouts(draw):
    """A small config whose sizes a random layout divides, groups of keys above and below the tensor size."""
    tensor, pipeline, chunks = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
    )
    expert, expert_tensor = draw(st.integers(1, 3)), draw(st.sampled_from([None, 1, 2]))
    layout = Layout(
        tensor, pipeline, chunks if pipeline > 1 else 1, expert, expert_tensor, draw(st.integers(1, 5))
    )
    small = st.integers(1, 2)
    groups = draw(st.sampled_from([g for g in (1, 2, 4, 8) if tensor % g == 0 or g % tensor == 0]))
    key_heads, ratio = tensor * draw(small), draw(small)
    kind = draw(st.sampled_from(["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3", "qwen3_moe"]))
    config = {
        "model_type": kind,
        "vocab_size": draw(st.integers(1, 9)),
        "hidden_size": tensor * draw(small),
        "intermediate_size": tensor * draw(small),
        "num_hidden_layers": layout.pipeline * layout.pipeline_chunks * draw(small),
        "num_key_value_heads": groups,
        "num_attention_heads": groups * max(1, tensor // groups) * draw(small),
        "head_dim": max(1, tensor // groups) * draw(small),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": ratio * key_heads,
        "linear_key_head_dim": draw(small),
        "linear_value_head_dim": draw(small),
        "linear_conv_kernel_dim": draw(small),
        "full_attention_interval": draw(st.integers(1, 3)),
        "mtp_num_hidden_layers": draw(st.integers(0, 2)),
        "tie_word_embeddings": draw(st.booleans()),
        "num_experts": expert * draw(small),
        "moe_intermediate_size": layout.expert_size * draw(small),
        "shared_expert_intermediate_size": tensor * draw(small),
    }
    if kind in ("qwen3", "qwen3_moe"):
        del config["mtp_num_hidden_layers"]
    names = ["model.layers.0.mlp.experts.gate_up_proj" if draw(st.booleans()) else "model.norm.weight"]
    return model_map(config, names=names), layout


@settings(max_examples=40, deadline=None)
@given(models_and_layouts(), st.sampled_from([0, None]), st.sampled_from([1, 60, 10**6]))
def test_any_small_model_in_any_layout_returns_bit_for_bit(
    in_memory, noise, import_all, export_all, model_and_layout, to, bucket_bytes
):
    table, layout = model_and_layout
    source = in_memory(noise(table.hf_shapes()))
    held = import_all(table, source, layout)
    gathered = export_all(table, held, layout, to=to, bucket_bytes=bucket_bytes, dtype_of=source.dtype)
    alone = dict(table.export_tensors(dict(table.import_tensors(source))))
    for buckets in gathered if to is None else gathered[:1]:
        found = {name: x for bucket in buckets for name, x in bucket.items()}
        assert list(found) == list(table.hf_shapes())
        for name, x in found.items():
            assert x.dtype == source.dtype(name)
            assert torch.equal(x, source.tensor(name)), name
            assert torch.equal(x, alone[name]), name
