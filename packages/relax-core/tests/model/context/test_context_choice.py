"""Which way context-parallel ranks share the work, and why; by hand."""

import logging

import pytest
from relax_core.device import ParallelConfig
from relax_core.model import Qwen35Config
from relax_core.model.context import choose_attention, choose_context, choose_delta
from relax_core.model.context.choose import _log


def attention(wanted="auto", heads=16, tensor=1, context=2):
    return choose_attention(wanted, heads=heads, tensor=tensor, context=context)


def delta(wanted="auto", key_heads=16, value_heads=32, tensor=1, context=2):
    return choose_delta(wanted, key_heads=key_heads, value_heads=value_heads, tensor=tensor, context=context)


@pytest.mark.parametrize("sizes", [{"context": 2}, {"context": 16}, {"context": 2, "tensor": 8}])
def test_attention_goes_over_heads_where_they_divide(sizes):
    choice = attention(**sizes)
    assert choice.way == "heads"
    ranks = sizes["context"] * sizes.get("tensor", 1)
    assert f"16 query heads divide by {ranks}: each rank attends over the whole row" in choice.reason


def test_attention_over_heads_needs_heads_and_says_how_many():
    assert attention(tensor=8, context=4).way == "gather"
    assert (
        "16 query heads do not divide by tensor 8 x context 4 = 32" in attention(tensor=8, context=4).reason
    )
    with pytest.raises(ValueError, match="16 query heads do not divide by tensor 8 x context 4 = 32"):
        attention("heads", tensor=8, context=4)
    assert attention("gather", tensor=8, context=4).way == "gather"
    assert attention("heads", tensor=4, context=4).way == "heads"


def test_the_delta_net_goes_over_heads_where_it_can_and_over_states_where_it_must():
    assert delta(context=16).way == "heads"
    choice = delta(tensor=8, context=4)
    assert choice.way == "state"
    assert "16 key heads do not divide by tensor 8 x context 4 = 32" in choice.reason
    with pytest.raises(ValueError, match=r"16 key heads do not divide by tensor 8 x context 4 = 32"):
        delta("heads", tensor=8, context=4)
    with pytest.raises(ValueError, match=r"16 key heads and 32 value heads do not divide by .* = 64"):
        delta("heads", tensor=16, context=4)
    assert delta("state", context=2).way == "state"


def test_one_rank_has_nothing_to_share():
    assert attention("heads", heads=3, context=1).reason == "one rank holds the whole row"
    assert delta("state", context=1).reason == "one rank holds the whole row"


def test_the_choice_is_logged_once_and_noted_for_the_layers(config_of, caplog):
    class Config:
        pass

    _log.cache_clear()
    model = Qwen35Config.from_hf(config_of(linear_num_key_heads=4))
    config = Config()
    with caplog.at_level(logging.INFO, logger="relax_core.model.context.choose"):
        for _ in range(2):
            choice = choose_context(config, model, ParallelConfig(context=4, context_attention="heads"))
    assert config.context_choice is choice
    assert [record.getMessage() for record in caplog.records] == [
        "context parallelism of full attention: heads (asked for by context_attention)",
        "context parallelism of the delta net: heads (4 key and 4 value heads divide by 4, and each token is "
        "scanned once)",
    ]
