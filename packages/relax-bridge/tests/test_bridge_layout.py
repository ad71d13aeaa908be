"""Positions and layers, against grids written out by hand (Megatron's own examples among them)."""

import pytest
from relax_bridge import BridgeError, Layout


def test_ranks_are_counted_tensor_axis_first_and_stages_last():
    layout = Layout(tensor=2, pipeline=2)
    assert [layout.position(rank)[:2] for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_experts_spread_over_the_same_ranks_with_a_tensor_size_of_their_own():
    layout = Layout(tensor=2, expert=4, expert_tensor=1)
    assert layout.world_size == 4
    places = [layout.position(rank) for rank in range(4)]
    assert [p.tensor for p in places] == [0, 1, 0, 1]
    assert [p.expert for p in places] == [0, 1, 2, 3]
    assert [p.dense_copy for p in places] == [0, 0, 1, 1]
    split = Layout(tensor=4, expert=2, expert_tensor=2)
    assert [(p.expert, p.expert_tensor) for p in map(split.position, range(4))] == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip


def test_data_parallel_copies_are_counted():
    layout = Layout(tensor=2, pipeline=2, ranks=8)
    assert [layout.position(rank).dense_copy for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.position(rank).pipeline for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_smallest_world_holds_dense_and_expert_axes():
    assert Layout(tensor=2, expert=3, expert_tensor=1).world_size == 6
    assert Layout(tensor=2, expert=2).world_size == 4, "experts are cut as everything else by default"


def numbers(chunks):
    return [[list(layers) for layers in stage] for stage in chunks]


def test_interleaved_chunks_go_round_the_stages():
    # The two examples in megatron-core's get_num_layers_to_build.
    assert numbers(Layout(pipeline=2, pipeline_chunks=4).layers(8)) == [
        [[0], [2], [4], [6]],
        [[1], [3], [5], [7]],
    ]
    assert numbers(Layout(pipeline=2, pipeline_chunks=2).layers(8)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_the_first_and_last_stage_may_have_other_numbers_of_layers():
    layout = Layout(pipeline=4, first_stage_layers=1, last_stage_layers=3)
    assert numbers(layout.layers(8)) == [[[0]], [[1, 2]], [[3, 4]], [[5, 6, 7]]]
    uneven = Layout(pipeline=2, pipeline_chunks=2, first_stage_layers=2)
    assert numbers(uneven.layers(6)) == [[[0], [3]], [[1, 2], [4, 5]]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 0}, "must be 1 or more; got tensor = 0"),
        ({"expert_tensor": -1}, "expert_tensor = -1"),
        ({"pipeline_chunks": 2}, "pipeline_chunks = 2 needs pipeline above 1"),
        ({"tensor": 2, "ranks": 3}, "ranks = 3 is no multiple of 2"),
    ],
)
def test_sizes_that_are_no_layout(sizes, message):
    with pytest.raises(BridgeError, match=message):
        Layout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ({"pipeline": 2}, 5),
        ({"pipeline": 2, "pipeline_chunks": 2}, 6),
        ({"pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 1}, 3),
        ({"pipeline": 3, "first_stage_layers": 4}, 3),
    ],
)
def test_layers_that_do_not_spread_are_refused_with_the_numbers(sizes, layers):
    with pytest.raises(BridgeError, match=f"{layers} layers do not spread evenly over {sizes['pipeline']}"):
        Layout(**sizes).layers(layers)


def test_a_rank_outside_the_world():
    with pytest.raises(BridgeError, match=r"rank 4 is not in 0\.\.3"):
        Layout(tensor=4).position(4)
