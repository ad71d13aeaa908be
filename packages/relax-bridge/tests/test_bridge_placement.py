"""Which rank holds what, against small cases worked out by hand."""

import pytest
import torch
from relax_bridge import BridgeError, Layout, Placement, model_map
from relax_bridge.models.published import PUBLISHED
from relax_bridge.partition import GroupedSplit


def names(config, layout, rank):
    return [(shard.chunk, shard.name) for shard in Placement(model_map(config), layout).shards(rank)]


def outside_layers(config, layout, rank):
    return [name for _, name in names(config, layout, rank) if "layers." not in name]


def test_a_stage_counts_its_layers_from_zero(tiny_config):
    shards = Placement(model_map(tiny_config()), Layout(pipeline=2)).shards(1)
    there = {shard.entry.megatron: shard.name for shard in shards}
    # Of layers 0 to 3 (delta net, attention, delta net, attention) the second stage has 2 and 3.
    moved = there["decoder.layers.3.self_attention.linear_qkv.weight"]
    assert moved == "decoder.layers.1.self_attention.linear_qkv.weight"
    assert "decoder.layers.0.self_attention.linear_qkv.weight" not in there


def test_interleaved_chunks_have_names_of_their_own(tiny_config):
    layout = Layout(pipeline=2, pipeline_chunks=2)
    shards = Placement(model_map(tiny_config()), layout).shards(0)
    norms = [
        (shard.chunk, shard.name, shard.entry.layer)
        for shard in shards
        if shard.name.endswith("input_layernorm.weight")
    ]
    assert norms == [
        (0, "decoder.layers.0.input_layernorm.weight", 0),
        (1, "decoder.layers.0.input_layernorm.weight", 2),
    ]


@pytest.mark.parametrize(
    ("mtp", "tied", "last"),
    [
        (
            1,
            False,
            ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"],
        ),
        (1, True, ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]),
        (0, False, ["decoder.final_layernorm.weight", "output_layer.weight"]),
        (0, True, ["output_layer.weight", "decoder.final_layernorm.weight"]),
    ],
)
def test_the_last_stage_has_the_embedding_where_mtp_or_a_tied_head_reads_it(tiny_config, mtp, tied, last):
    config = tiny_config(mtp_num_hidden_layers=mtp, tie_word_embeddings=tied)
    layout = Layout(pipeline=2)
    assert outside_layers(config, layout, 0) == ["embedding.word_embeddings.weight"]
    assert outside_layers(config, layout, 1) == last
    assert any(name.startswith("mtp.") for _, name in names(config, layout, 1)) == bool(mtp)
    assert not any(name.startswith("mtp.") for _, name in names(config, layout, 0))


def test_the_last_chunk_of_the_last_stage_has_head_and_mtp(tiny_config):
    found = names(tiny_config(), Layout(pipeline=2, pipeline_chunks=2), 1)
    assert {chunk for chunk, name in found if name.startswith(("mtp.", "output_layer", "embedding"))} == {1}


def test_one_stage_has_one_embedding(tiny_config):
    config = tiny_config(tie_word_embeddings=True)
    assert outside_layers(config, Layout(), 0).count("embedding.word_embeddings.weight") == 1


def test_experts_are_counted_from_zero_on_every_rank(moe_config):
    table = model_map(moe_config(num_experts=4))
    layout = Layout(expert=2, expert_tensor=1)
    for rank in range(2):
        shards = [s for s in Placement(table, layout).shards(rank) if s.entry.expert is not None]
        of_one_layer = [
            (s.name[-1], s.entry.expert)
            for s in shards
            if s.name.startswith("decoder.layers.0.mlp.experts.linear_fc1")
        ]
        assert of_one_layer == [("0", 2 * rank), ("1", 2 * rank + 1)]
        dense = [s for s in Placement(table, layout).shards(rank) if s.entry.expert is None]
        assert len(dense) == sum(entry.expert is None for entry in table.entries)


def test_more_ranks_than_groups_split_queries_gates_key_and_value():
    # Two groups of four query heads of four rows: [q0-3 g0-3 k0 v0 | q4-7 g4-7 k1 v1].
    split = GroupedSplit(2, 4, 4, 2)
    heads = [[*(f"{x}{4 * g + i}" for x in "qg" for i in range(4)), f"k{g}", f"v{g}"] for g in range(2)]
    rows = [f"{head}.{row}" for group in heads for head in group for row in range(4)]

    def held(rank, ranks):
        return [rows[i] for i in split.shard(torch.arange(80), rank, ranks).tolist()]

    def whole(head):
        return [f"{head}.{row}" for row in range(4)]

    for rank in range(8):
        group, share = divmod(rank, 4)
        own = [*whole(f"q{rank}"), *whole(f"g{rank}"), f"k{group}.{share}", f"v{group}.{share}"]
        assert held(rank, 8) == own
    assert held(1, 4) == [
        *(row for head in ("q2", "q3", "g2", "g3") for row in whole(head)),
        *("k0.2", "k0.3", "v0.2", "v0.3"),
    ]
    shards = [split.shard(torch.arange(80), rank, 8) for rank in range(8)]
    assert sorted(torch.cat(shards).tolist()) == list(range(80)), "every row on one rank"
    assert split.gather(shards).tolist() == list(range(80))


@pytest.mark.parametrize(("ranks", "heads", "dim"), [(3, 4, 4), (4, 3, 4), (6, 2, 4), (4, 4, 3)])
def test_ranks_that_neither_divide_nor_share_the_groups_are_refused(ranks, heads, dim):
    split = GroupedSplit(2, heads, dim, 2)
    with pytest.raises(BridgeError, match=f"2 groups of {heads} query heads cannot be spread over {ranks}"):
        split.shard(torch.arange(split.whole), 0, ranks)


def test_the_published_moe_is_cut_over_eight_ranks_with_two_groups():
    shards = Placement(model_map(PUBLISHED["Qwen3.5-35B-A3B"]), Layout(tensor=8)).shards(5)
    (qkv,) = (s for s in shards if s.entry.megatron == "decoder.layers.3.self_attention.linear_qkv.weight")
    assert qkv.shape == (4 * 256 + 2 * 64, 2048), "two query heads, two gates, a quarter of key and value"
    # Rank 5 has query heads 10 and 11, whose [query; gate] pairs lie at rows 5120 to 6143 of q_proj.
    q = [(p.start, p.size, p.at) for p in qkv.cutting.pieces if p.part == 0]
    assert q == [(5120, 256, 0), (5632, 256, 256), (5376, 256, 512), (5888, 256, 768)]
    # It is the second of the four ranks of the second key.
    assert [(p.part, p.start, p.size) for p in qkv.cutting.pieces if p.part] == [(1, 320, 64), (2, 320, 64)]


def test_the_vocabulary_is_padded_to_a_multiple_for_all_ranks(tiny_config):
    placement = Placement(model_map(tiny_config()), Layout(tensor=2, vocab_multiple=16))
    # 50 rows are padded to 64: 32 on each rank, of which the second has 18.
    shards = [placement.shards(rank)[0] for rank in range(2)]
    assert [shard.shape for shard in shards] == [(32, 16), (32, 16)]
    assert [shard.cutting.pieces[0][:3] for shard in shards] == [(0, 0, 32), (0, 32, 18)]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=3), r"in_proj\.weight: component 'q' has 2 units of 4; a tensor-parallel size of 3"),
        (Layout(expert=2, expert_tensor=1), r"linear_fc1\.weight\{e\}: 3 experts cannot be spread over 2"),
        (Layout(pipeline=3), "4 layers do not spread evenly"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_tensor(moe_config, layout, message):
    config = moe_config(vocab_size=60, hidden_size=18)
    with pytest.raises(BridgeError, match=message):
        Placement(model_map(config), layout)
