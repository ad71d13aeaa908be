"""Layers over pipeline stages, as Megatron and the bridge place them; a refusal says what works."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from relax_bridge import BridgeError, Layout
from relax_core.device import ParallelConfig
from relax_core.model.stages import stage_layers


def placed_by_the_bridge(layers, parallel):
    layout = Layout(
        pipeline=parallel.pipeline,
        pipeline_chunks=parallel.pipeline_chunks,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
    )
    try:
        found = layout.layers(layers)
    except BridgeError:
        return None
    return found if all(piece for stage in found for piece in stage) else None


@given(
    st.integers(1, 40), st.integers(2, 6), st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 12)), st.one_of(st.none(), st.integers(1, 12)),
)  # fmt: skip
def test_the_bridge_places_them_alike_and_refuses_the_same(layers, pipeline, chunks, first, last):
    parallel = ParallelConfig(
        pipeline=pipeline, pipeline_chunks=chunks, first_stage_layers=first, last_stage_layers=last
    )
    wanted = placed_by_the_bridge(layers, parallel)
    if wanted is None:
        with pytest.raises(ValueError, match="cannot be cut"):
            stage_layers(layers, parallel)
    else:
        assert stage_layers(layers, parallel) == wanted


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        (9, {"pipeline": 4, "first_stage_layers": 2, "last_stage_layers": 1}),
        (7, {"pipeline": 2, "last_stage_layers": 3}),
        (10, {"pipeline": 3, "pipeline_chunks": 2, "first_stage_layers": 2, "last_stage_layers": 4}),
        (12, {"pipeline": 3, "pipeline_chunks": 2}),
    ],
)
def test_megatron_counts_them_alike(monkeypatch, layers, sizes):
    parallel = ParallelConfig(**sizes)
    chunks = parallel.pipeline_chunks

    class Config:
        num_layers = layers
        pipeline_model_parallel_size = parallel.pipeline
        pipeline_model_parallel_layout = None
        virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
        num_layers_in_first_pipeline_stage = parallel.first_stage_layers
        num_layers_in_last_pipeline_stage = parallel.last_stage_layers
        account_for_embedding_in_pipeline_split = False
        account_for_loss_in_pipeline_split = False

    for stage, pieces in enumerate(stage_layers(layers, parallel)):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        for chunk, piece in enumerate(pieces):
            where = chunk if chunks > 1 else None
            offset = get_transformer_layer_offset(Config, where, stage)
            assert range(offset, offset + get_num_layers_to_build(Config, where, stage)) == piece


def test_layers_by_hand():
    parallel = ParallelConfig(pipeline=3, first_stage_layers=1, last_stage_layers=2)
    assert stage_layers(7, parallel) == ((range(1),), (range(1, 5),), (range(5, 7),))


@given(
    st.integers(2, 40), st.integers(2, 6), st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 12)), st.one_of(st.none(), st.integers(1, 12)),
)  # fmt: skip
def test_what_a_refusal_proposes_works_beside_the_rest_as_it_is(layers, pipeline, chunks, first, last):
    given = {"pipeline": pipeline, "pipeline_chunks": chunks}
    given |= {"first_stage_layers": first, "last_stage_layers": last}
    try:
        stage_layers(layers, ParallelConfig(**given))
    except ValueError as error:
        text = str(error)
    else:
        return
    proposed = text.split("; ")[1]
    if found := re.fullmatch(
        r"set pipeline to (\d+) and pipeline_chunks to (\d+)(, first.* to null)?", proposed
    ):
        ends = {"first_stage_layers": None, "last_stage_layers": None} if found[3] else {}
        sizes = {"pipeline": int(found[1]), "pipeline_chunks": int(found[2])}
        stage_layers(layers, ParallelConfig(**given | sizes | ends))
        return
    ways = re.findall(r"(pipeline|pipeline_chunks) to (\d+)(?: or (\d+))?", proposed)
    for name, *sizes in ways:
        for size in filter(None, sizes):
            stage_layers(layers, ParallelConfig(**given | {name: int(size)}))
    if found := re.search(r"first_stage_layers to (\d+) and last_stage_layers to (\d+)", proposed):
        ends = {"first_stage_layers": int(found[1]), "last_stage_layers": int(found[2])}
        stage_layers(layers, ParallelConfig(**given | ends))
    assert ways or found


def test_a_refusal_names_the_sizes_and_a_way():
    with pytest.raises(
        ValueError,
        match=r"6 layers cannot be cut into pipeline 4 x pipeline_chunks 1 = 4 pieces of one size; "
        r"set pipeline to 3 or 6, or first_stage_layers to 1 and "
        r"last_stage_layers to 1 \(the others have 2\)",
    ):
        stage_layers(6, ParallelConfig(pipeline=4))
    with pytest.raises(ValueError, match=r"= 6 pieces of one size; set pipeline_chunks to 2$"):
        stage_layers(4, ParallelConfig(pipeline=2, pipeline_chunks=3))
    with pytest.raises(ValueError, match=r"first_stage_layers 4; set first_stage_layers to 2 and last_st"):
        stage_layers(4, ParallelConfig(pipeline=2, first_stage_layers=4))
    with pytest.raises(ValueError, match=r"= 2 pieces with first_stage_layers 3 and last_stage_layers 2"):
        stage_layers(4, ParallelConfig(pipeline=2, first_stage_layers=3, last_stage_layers=2))


@pytest.mark.parametrize("name", ["first_stage_layers", "last_stage_layers"])
def test_one_stage_has_all_layers(name):
    with pytest.raises(ValueError, match=f"{name} is 2 and pipeline is 1"):
        ParallelConfig(**{name: 2})
