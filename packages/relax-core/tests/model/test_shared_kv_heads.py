"""More tensor-parallel ranks than key/value heads: which rows of the fused projection a rank holds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relax_bridge.partition import GroupedSplit
from relax_core.model import Qwen35Config
from relax_core.model.attention import shared_blocks
from relax_core.model.fits import ranks_per_kv_head


def test_eight_ranks_share_two_heads_as_the_bridge_cuts_them():
    # 16 query heads of 256 features on 2 key/value heads, as published for Qwen3.5-35B-A3B.
    split = GroupedSplit(2, 8, 256, 2)
    whole = torch.arange(split.whole)
    held = [shared_blocks(rank, sharing=4, heads=8) for rank in range(8)]
    # Two query heads of four blocks, as many gates, a block of the key and one of the value.
    assert held[5] == [72 + block for block in (*range(8, 16), *range(40, 48), 65, 69)]
    for rank, blocks in enumerate(held):
        rows = torch.cat([whole[64 * block : 64 * (block + 1)] for block in blocks])
        assert torch.equal(rows, split.shard(whole, rank, 8))
    assert sorted(block for blocks in held for block in blocks) == list(range(split.whole // 64))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_rank_has_the_gates_of_its_queries_and_an_equal_share_of_their_key(groups, sharing, own, width):
    # `groups` key/value heads for `sharing` ranks each, which have `own` query heads; blocks of `width` rows.
    heads, dim = own * sharing, width * sharing
    names = [
        (kind, group, head, row)
        for group in range(groups)
        for kind, count in (("q", heads), ("gate", heads), ("k", 1), ("v", 1))
        for head in range(count)
        for row in range(dim)
    ]
    seen = []
    for rank in range(groups * sharing):
        blocks = shared_blocks(rank, sharing=sharing, heads=heads)
        rows = [names[block * width + i] for block in blocks for i in range(width)]
        group, place = divmod(rank, sharing)
        mine = range(place * own, (place + 1) * own)
        queries = [(group, head, row) for head in mine for row in range(dim)]
        share = [(group, 0, row) for row in range(place * width, (place + 1) * width)]
        for kind, wanted in (("q", queries), ("gate", queries), ("k", share), ("v", share)):
            assert [rest for name, *rest in rows if name == kind] == [list(one) for one in wanted]
        seen += rows
    assert sorted(seen) == sorted(names)


@pytest.mark.parametrize(("ranks", "sharing"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_ranks_divide_the_heads_or_share_them(config_of, ranks, sharing):
    model = Qwen35Config.from_hf(config_of(num_attention_heads=8, num_key_value_heads=2))
    assert ranks_per_kv_head(model, ranks) == sharing


@pytest.mark.parametrize("ranks", [3, 6, 16])
def test_other_numbers_of_ranks_are_refused(config_of, ranks):
    model = Qwen35Config.from_hf(config_of(num_attention_heads=8, num_key_value_heads=2))
    with pytest.raises(ValueError, match=f"do not spread over {ranks} .* a multiple of 2 that divides 8"):
        ranks_per_kv_head(model, ranks)
