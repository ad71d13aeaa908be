"""Contract: a weight update is all or nothing, and every token knows its version."""

import asyncio
import logging

import pytest
import torch
from relax_rollout import EngineError, EngineStateError, WeightUpdateError, tensor_digest

TOLERANCE = 1e-5


@pytest.fixture
def target(models):
    """The model to update to."""
    return models.load(seed=1)


@pytest.fixture
def tensors(target) -> dict[str, torch.Tensor]:
    """Its weights as its checkpoint has them: the tied head is not stored."""
    return {name: t.clone() for name, t in target.state_dict().items() if name != "lm_head.weight"}


async def update(engine, tensors, version=1, buckets=3):
    names = list(tensors)
    dtypes = await engine.begin_update(version)
    for n in range(buckets):
        await engine.load({name: tensors[name] for name in names[n::buckets]})
    return dtypes, await engine.end_update()


def test_after_an_update_the_new_weights_serve(harness, mixed, gap, target, tensors):
    async def test(engine):
        _, digests = await update(engine, tensors, version=7)
        return digests, await engine.generate(mixed), await engine.health()

    digests, completions, health = harness.run(test)
    assert gap(target, mixed, completions) < TOLERANCE
    assert {v for c in completions for v in c.versions} == {7}
    assert (health.version, health.updating, health.unused_tensors) == (7, None, 0)
    assert digests == {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def test_an_updated_engine_equals_one_started_from_those_weights(harness, mixed, tensors):
    async def test(engine):
        await engine.generate(mixed)
        await update(engine, tensors, version=0)
        return await engine.generate(mixed)

    assert harness.run(test) == harness.generate(mixed, harness.other)


def test_kept_weights_stay_are_digested_and_refused_when_they_come(harness, models, tensors):
    """Half of the weights stay as they serve; one more that is named is not served with."""
    before = models.load().state_dict()
    names = list(tensors)
    kept, sent = names[::2], names[1::2]

    async def test(engine):
        await engine.begin_update(1, [*kept, "model.visual.none"])
        await engine.load({name: tensors[name] for name in sent})
        digests = await engine.end_update()
        await engine.begin_update(2, kept)
        with pytest.raises(WeightUpdateError, match=f"{kept[0]} is to stay as it is in the update to"):
            await engine.load({kept[0]: tensors[kept[0]]})
        return digests

    digests = harness.run(test)
    wanted = {name: before[name] for name in kept} | {name: tensors[name] for name in sent}
    assert digests == {name: tensor_digest(tensor) for name, tensor in wanted.items()}


def test_dtypes_are_announced_and_tensors_cast(harness, tensors):
    async def test(engine):
        return await update(engine, {name: tensor.double() for name, tensor in tensors.items()})

    dtypes, digests = harness.run(test)
    assert set(dtypes.values()) == {"float32"}
    assert set(tensors) <= set(dtypes)
    assert digests == {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def test_tensors_may_change_after_load(harness, mixed, gap, target, tensors):
    async def test(engine):
        await engine.begin_update(1)
        await engine.load(tensors)
        for tensor in tensors.values():
            tensor.zero_()
        await engine.end_update()
        return await engine.generate(mixed)

    assert gap(target, mixed, harness.run(test)) < TOLERANCE


def test_draft_weights_are_accepted_and_counted(harness, tensors):
    async def test(engine):
        drafts = {"mtp.norm.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(2, 2)}
        _, digests = await update(engine, tensors | drafts)
        return digests, await engine.health()

    digests, health = harness.run(test)
    assert health.unused_tensors == 2
    assert set(digests) == set(tensors)


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
WRONG = {
    "unknown": (
        lambda t: t | {"model.layers.9.mlp.up_proj.weight": torch.zeros(1)},
        r"no weight called model\.layers\.9",
    ),
    "missing": (
        lambda t: without(t, NORM),
        r"lacks 1 of the model's weights, for example model\.norm\.weight",
    ),
    "misshaped": (
        lambda t: t | {NORM: torch.zeros(31)},
        r"model\.norm\.weight has shape \[31\]; the model's is \[32\]",
    ),
    "transposed": (lambda t: t | {EMBEDDING: t[EMBEDDING].T}, r"shape \[32, 40\]"),
    "whole numbers": (lambda t: t | {NORM: torch.zeros(32, dtype=torch.int64)}, "int64"),
    "an untied head": (
        lambda t: t | {"lm_head.weight": t[EMBEDDING] + 1},
        "are tied in this model but differ",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_update_is_refused_and_the_old_version_serves(harness, mixed, tensors, fault):
    spoil, words = WRONG[fault]

    async def test(engine):
        before = await engine.generate(mixed)
        with pytest.raises(WeightUpdateError, match=words):
            await update(engine, spoil(tensors))
        with pytest.raises(EngineStateError, match="no update is open"):
            await engine.load({})
        assert await engine.generate(mixed) == before
        health = await engine.health()
        assert (health.version, health.updating) == (0, None)
        await update(engine, tensors)
        assert (await engine.health()).version == 1

    harness.run(test)


def test_a_name_given_twice_is_refused(harness, tensors):
    async def test(engine):
        await engine.begin_update(1)
        await engine.load(tensors)
        with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight was given twice"):
            await engine.load({NORM: tensors[NORM]})

    harness.run(test)


def test_a_tied_head_may_come_along(harness, mixed, gap, target, tensors):
    async def test(engine):
        await update(engine, tensors | {"lm_head.weight": tensors[EMBEDDING].clone()})
        return await engine.generate(mixed)

    assert gap(target, mixed, harness.run(test)) < TOLERANCE


def test_an_untied_head_must_come(harness, models, tensors):
    async def test(engine):
        with pytest.raises(WeightUpdateError, match=r"lm_head\.weight"):
            await update(engine, tensors)

    harness.run(test, models.get(tied=False))


def test_load_and_end_need_an_open_update(harness):
    async def test(engine):
        with pytest.raises(EngineStateError, match="no update is open"):
            await engine.load({})
        with pytest.raises(EngineStateError, match="no update is open"):
            await engine.end_update()
        with pytest.raises(ValueError, match="version is -1"):
            await engine.begin_update(-1)

    harness.run(test)


def test_a_new_update_drops_an_unfinished_one_with_a_warning(harness, mixed, gap, target, tensors, caplog):
    async def test(engine):
        await engine.begin_update(1)
        await engine.load({NORM: torch.zeros(32)})
        await update(engine, tensors, version=2)
        return await engine.generate(mixed)

    with caplog.at_level(logging.WARNING):
        assert gap(target, mixed, harness.run(test)) < TOLERANCE
    assert "update to version 1 was never ended" in caplog.text


def test_until_the_end_the_old_version_serves(harness, mixed, tensors):
    async def test(engine):
        before = await engine.generate(mixed)
        await engine.begin_update(1)
        await engine.load(tensors)
        assert (await engine.health()).updating == 1
        assert await engine.generate(mixed) == before

    harness.run(test)


@pytest.mark.parametrize("pausing", [True, False])
def test_completions_in_flight_go_on_under_the_new_weights(
    harness, ask, until, models, reference, target, tensors, pausing
):
    requests = [ask(str(n), tuple(range(1, 3 + n)), max_new_tokens=300, seed=n) for n in range(4)]

    async def test(engine):
        task = asyncio.create_task(engine.generate(requests))
        await until(engine, lambda h: h.running == 4)
        if pausing:
            await engine.pause()
        await update(engine, tensors)
        if pausing:
            await engine.resume()
        return await task

    for request, completion in zip(requests, harness.run(test), strict=True):
        old = completion.versions.count(0)
        assert completion.versions == (0,) * old + (1,) * (300 - old)
        assert old < 300
        ids, start = (*request.prompt_ids, *completion.token_ids), len(request.prompt_ids)
        tokens = torch.tensor(completion.token_ids)[:, None]
        by_old = reference(models.load(), ids, start).gather(1, tokens)[:old, 0]
        by_new = reference(target, ids, start).gather(1, tokens)[old:, 0]
        assert torch.cat([by_old, by_new]).tolist() == pytest.approx(completion.logprobs, abs=1e-4)


def test_broken_weights_raise_and_a_good_update_mends(harness, mixed, gap, target, tensors):
    async def test(engine):
        await update(engine, tensors | {NORM: torch.full((32,), float("nan"))})
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(mixed)
        assert "not finite" in (await engine.health()).last_error
        await update(engine, tensors, version=2)
        return await engine.generate(mixed)

    assert gap(target, mixed, harness.run(test)) < TOLERANCE
