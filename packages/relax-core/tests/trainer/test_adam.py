"""The optimizer on shards of its own, without Megatron."""

from types import SimpleNamespace

import pytest
import torch
from relax_core.trainer.adam import Adam, Place, shard_places
from torch import nn

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make(*shards, places=None, state_dtype=torch.bfloat16):
    places = places or {shard: Place(n, 0) for n, shard in enumerate(shards)}
    return Adam([{"params": list(shards), **SETTINGS}], places, state_dtype=state_dtype)


def take_steps(adam, *gradients):
    for _ in range(3):
        for shard, gradient in zip(adam.param_groups[0]["params"], gradients, strict=True):
            shard.decoupled_grad = gradient
        adam.step()


def test_a_float32_weight_set_is_the_one_read_and_its_nearest_bfloat16_the_weight():
    value = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    low, whole = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000)
    adam = make(low, whole)
    for shard in (low, whole):
        adam.set_scaled_state(shard, "master_param", value)
        assert torch.equal(adam.get_unscaled_state(shard, "master_param"), value)
    assert torch.equal(low, value.bfloat16())
    assert torch.equal(whole, value)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_means_set_are_those_read(name):
    low = torch.zeros(8, dtype=torch.bfloat16)
    adam, value = make(low), torch.arange(8.0)
    adam.set_scaled_state(low, name, value)
    assert torch.equal(adam.get_unscaled_state(low, name), value)
    assert adam.get_unscaled_state(low, name).dtype is torch.float32


def test_a_weight_split_over_ranks_moves_as_the_whole_one():
    generator = torch.Generator().manual_seed(1)
    start, gradient = (torch.randn(1000, generator=generator).bfloat16() for _ in range(2))
    whole = start.clone()
    one = make(whole, places={whole: Place(5, 0)})
    take_steps(one, gradient)
    head, tail = start[:300].clone(), start[300:].clone()
    two = make(head, tail, places={head: Place(5, 0), tail: Place(5, 300)})
    take_steps(two, gradient[:300], gradient[300:])
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        parts = [two.get_unscaled_state(shard, name) for shard in (head, tail)]
        assert torch.equal(torch.cat(parts), one.get_unscaled_state(whole, name)), name


def test_every_weight_has_a_seed_of_its_own_and_shards_know_where_they_begin():
    model = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 2).bfloat16()])
    names = dict(model.named_parameters())
    low = [names["1.weight"], names["1.bias"]]
    high = [names["0.bias"], names["0.weight"]]
    begins = {id(weight): n * 7 for n, weight in enumerate((*low, *high))}
    shards = {id(weight): weight.detach().view(-1)[1:] for weight in names.values()}
    optimizer = SimpleNamespace(
        model_fp32_groups=[high[:1], high[1:]],
        shard_fp32_groups=[[shards[id(high[0])]], [shards[id(high[1])]]],
        model_float16_groups=[low, []],
        shard_float16_groups=[[shards[id(w)] for w in low], []],
        _get_model_param_range_map=lambda weight: {"param": SimpleNamespace(start=begins[id(weight)])},
    )
    places = shard_places(optimizer, [model[0], model[1]])
    order = list(names.values())
    assert {id(s): p for s, p in places.items()} == {
        id(shards[id(w)]): Place(seed, begins[id(w)]) for seed, w in enumerate(order)
    }
