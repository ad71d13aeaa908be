"""The bounded queue of groups that are sampled ahead."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from relax_core.data import ExampleStream, Prompt
from relax_core.loop.config import RolloutConfig
from relax_core.loop.groups import Group, Scored
from relax_core.loop.streaming import Streaming, staleness_metrics
from relax_core.loop.trajectory import Trajectory
from relax_rollout.rewards import RewardResult

RECORDER = SimpleNamespace(phase=lambda name: nullcontext())


class Sampled:
    """A sampler whose groups end when they are told to, in any order."""

    stop_token_ids = ()

    def __init__(self, *, at_once=True, dull=()):
        self.begun: dict[str, int] = {}
        self.version = 0
        self.gates: dict[str, asyncio.Event] = {}
        self.at_once = at_once
        self.dull = dull

    async def groups(self, prompts, sampling, *, samples_per_prompt, place):
        (prompt,) = prompts
        self.begun[prompt.id] = self.version
        gate = self.gates.setdefault(prompt.id, asyncio.Event())
        if not self.at_once:
            await gate.wait()
        members = [
            Scored(
                Trajectory(
                    (1, 2), (-0.5, -0.25), (self.begun[prompt.id], self.version), (True, True), "stop"
                ),
                "text",
                RewardResult(score=float(i if prompt.id not in self.dull else 0)),
            )
            for i in range(samples_per_prompt)
        ]
        return [Group(prompt, tuple(members))]


def stream():
    prompts = [Prompt(f"p{i}", np.array([i + 1], dtype=np.int32), f"p{i}") for i in range(7)]
    return ExampleStream(prompts, seed=0, shuffle=False)


def queue(sampler, *, staleness=1, steps=100, **settings):
    config = RolloutConfig(prompts_per_step=2, samples_per_prompt=2, **settings)
    return Streaming(sampler, stream(), RECORDER, config, max_staleness=staleness, steps=steps)


def names(batch):
    return [group.prompt.id for group in batch.groups]


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_group_is_begun_more_versions_before_it_is_trained_than_allowed(staleness):
    async def go():
        sampler = Sampled()
        ahead = queue(sampler, staleness=staleness)
        ages = []
        await ahead.advance(0)
        for step in range(1, 8):
            # The trainer takes its time: everything that may be sampled is.
            for _ in range(10):
                await asyncio.sleep(0)
            batch = await ahead.take(step)
            ages += [step - 1 - group.members[0].trajectory.versions[0] for group in batch.groups]
            sampler.version = step
            await ahead.advance(step)
        return ages

    ages = asyncio.run(go())
    assert max(ages) == staleness
    assert ages[:2] == [0, 0]


def test_groups_come_in_the_order_of_prompts_each_once_however_they_end():
    async def go():
        sampler = Sampled(at_once=False)
        ahead = queue(sampler)
        await ahead.advance(0)
        await asyncio.sleep(0)
        assert list(sampler.gates) == ["p0", "p1", "p2", "p3"]
        for name in ("p3", "p2", "p1"):
            sampler.gates[name].set()
        taking = asyncio.create_task(ahead.take(1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not taking.done()
        sampler.gates["p0"].set()
        first = names(await taking)
        return first + names(await ahead.take(2))

    assert asyncio.run(go()) == ["p0", "p1", "p2", "p3"]


def test_nothing_is_sampled_for_steps_after_the_last():
    async def go():
        sampler = Sampled()
        ahead = queue(sampler, staleness=5, steps=2)
        await ahead.advance(0)
        await asyncio.sleep(0)
        return list(sampler.begun)

    assert asyncio.run(go()) == ["p0", "p1", "p2", "p3"]


def test_a_saved_queue_goes_on_with_its_finished_groups_and_samples_the_others_again():
    async def first():
        sampler = Sampled(at_once=False)
        ahead = queue(sampler)
        await ahead.advance(0)
        await asyncio.sleep(0)
        for name in ("p0", "p1", "p3"):
            sampler.gates[name].set()
        assert names(await ahead.take(1)) == ["p0", "p1"]
        await asyncio.sleep(0)
        return ahead.state()

    async def second(state):
        sampler = Sampled()
        sampler.version = 9
        ahead = queue(sampler)
        ahead.load(state)
        await ahead.advance(1)
        batches = [await ahead.take(2), await ahead.take(3)]
        return [names(batch) for batch in batches], sampler.begun, batches[0].groups[1]

    state = asyncio.run(first())
    assert list(state["finished"]) == [3]
    batches, begun, kept = asyncio.run(second(state))
    assert batches == [["p2", "p3"], ["p4", "p5"]]
    assert set(begun) == {"p2", "p4", "p5"}
    assert kept.members[1].trajectory == Trajectory((1, 2), (-0.5, -0.25), (0, 0), (True, True), "stop")
    assert kept.members[1].result.score == 1.0


def test_groups_without_spread_are_replaced_by_later_prompts_and_counted():
    async def go():
        ahead = queue(Sampled(dull=("p0", "p3")), dynamic_sampling=True)
        await ahead.advance(0)
        batches = []
        for step in (1, 2):
            batches.append(await ahead.take(step))
            await ahead.advance(step)
        return batches

    first, second = asyncio.run(go())
    assert (names(first), first.dropped, first.tokens) == (["p1", "p2"], 1, 12)
    assert (names(second), second.dropped) == (["p4", "p5"], 1)


def test_ages_are_counted_from_the_version_that_a_step_trains():
    def group(*versions):
        tokens = tuple(range(len(versions)))
        drawn = (True,) * len(versions)
        trajectory = Trajectory(tokens, (0.0,) * len(versions), versions, drawn, "stop")
        prompt = Prompt("p", np.array([1], dtype=np.int32), "p")
        return Group(prompt, (Scored(trajectory, "", RewardResult(0.0)),))

    found = staleness_metrics((group(3, 3, 4), group(4, 4)), 5)
    assert found == {"staleness_mean": 2 / 5, "staleness_max": 1, "mixed_fraction": 0.5}
