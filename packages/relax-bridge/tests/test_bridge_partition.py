"""Cutting over tensor-parallel ranks, against pieces written out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relax_bridge import BridgeError
from relax_bridge.partition import Component, Replicated, Split
from relax_bridge.transforms import GroupedQkv


def test_every_component_is_cut_on_its_own():
    split = Split(0, (Component("gate", 4), Component("up", 4)))
    full = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13])
    assert split.shard(full, 0, 2).tolist() == [0, 1, 10, 11]
    assert split.shard(full, 1, 2).tolist() == [2, 3, 12, 13]
    # Joining the shards end to end is exactly the mistake the gather must not make.
    shards = [split.shard(full, rank, 2) for rank in range(2)]
    assert not torch.equal(torch.cat(shards), full)
    assert torch.equal(split.gather(shards), full)


def test_columns_are_cut_along_axis_one():
    split = Split(1, (Component("heads", 4, 2),))
    assert split.shard(torch.tensor([[0, 1, 2, 3]]), 1, 2).tolist() == [[2, 3]]


def test_a_head_is_never_cut_in_two():
    split = Split(0, (Component("q", 8, 4),))
    with pytest.raises(BridgeError, match="'q' has 2 units of 4; a tensor-parallel size of 4"):
        split.shard(torch.zeros(8), 0, 4)


def test_the_vocabulary_is_padded_with_zeros_and_gather_takes_them_off():
    split = Split(0, (Component("vocab", 5),), pad_multiple=2)
    full = torch.tensor([1.0, 2, 3, 4, 5])
    shards = [split.shard(full, rank, 2) for rank in range(2)]
    assert [s.tolist() for s in shards] == [[1, 2, 3, 4], [5, 0, 0, 0]]
    assert torch.equal(split.gather(shards), full)


def test_drifted_replicas_are_refused():
    same = torch.tensor([1.0, float("nan")])
    assert Replicated().gather([same, same.clone()]) is same
    with pytest.raises(BridgeError, match="rank 1's copy"):
        Replicated().gather([same, torch.tensor([1.0, 2.0])])


def test_a_rank_outside_the_group_and_a_shard_of_another_length_are_refused():
    split = Split(0, (Component("x", 4),))
    with pytest.raises(BridgeError, match=r"rank 2 is not in 0\.\.1"):
        split.shard(torch.zeros(4), 2, 2)
    with pytest.raises(BridgeError, match="rank 1's shard has 3"):
        split.gather([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(BridgeError, match="has 5 rows; the table says 4"):
        split.shard(torch.zeros(5), 0, 1)


@given(
    units=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=5),
    ranks=st.sampled_from([1, 2, 4]),
    axis=st.sampled_from([0, 1]),
    pad=st.sampled_from([None, 1, 3]),
)
def test_gather_undoes_shard(units, ranks, axis, pad):
    if pad is not None:
        split = Split(axis, (Component("vocab", units[0][0]),), pad_multiple=pad)
    else:
        split = Split(axis, tuple(Component(str(i), n * u * ranks, u) for i, (n, u) in enumerate(units)))
    size = sum(part.size for part in split.components)
    full = torch.arange(size * 3).reshape((size, 3) if axis == 0 else (3, size))
    shards = [split.shard(full, rank, ranks) for rank in range(ranks)]
    assert torch.equal(split.gather(shards), full)


@given(per_rank=st.integers(1, 2), ranks=st.sampled_from([1, 2, 4]), heads=st.integers(1, 3))
def test_an_even_cut_of_linear_qkv_is_the_fused_cut_of_each_projection(per_rank, ranks, heads):
    groups, dim, hidden = per_rank * ranks, 2, 3
    q = torch.arange(groups * heads * 2 * dim * hidden).reshape(-1, hidden)
    k = 10_000 + torch.arange(groups * dim * hidden).reshape(-1, hidden)
    v = 20_000 + torch.arange(groups * dim * hidden).reshape(-1, hidden)
    fused = GroupedQkv(groups, heads, dim, gate=True).forward([q, k, v])
    split = Split(0, (Component("groups", fused.shape[0]),))
    for rank in range(ranks):
        mine = [x.chunk(ranks)[rank] for x in (q, k, v)]
        want = GroupedQkv(per_rank, heads, dim, gate=True).forward(mine)
        assert torch.equal(split.shard(fused, rank, ranks), want)
