"""More prompts are begun than are wanted; the others are stopped and come first in the next step."""

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from relax_core.data import ExampleStream, Prompt
from relax_core.loop.config import RolloutConfig
from relax_core.loop.episode import EpisodeLimits
from relax_core.loop.sampler import Sampler, TimeLimits
from relax_core.loop.stepwise import Racing, sampling_params
from relax_rollout import Completion
from relax_rollout.pictures import Picture, PlacedPicture
from relax_rollout.rewards import RewardResult

PHASES = SimpleNamespace(phase=lambda name: nullcontext())
TOKENIZER = SimpleNamespace(batch_decode=lambda rows, skip_special_tokens: [str(row) for row in rows])


class Engine:
    """Draws a token per tick for everybody; a prompt p ends after p tokens in all."""

    def __init__(self):
        self.version, self.rows, self.asked = 0, {}, []

    async def generate(self, requests):
        self.asked += requests
        for request in requests:
            self.rows[request.id] = [request, []]
        while any(self._reason(request.id) is None for request in requests):
            await asyncio.sleep(0.001)
            for request in requests:
                if self._reason(request.id) is None:
                    self.rows[request.id][1].append(self.version)
        return [self._completion(request.id) for request in requests]

    def _reason(self, name):
        request, drawn = self.rows[name]
        if drawn and drawn[-1] == "abort":
            return "abort"
        return "stop" if len(request.prompt_ids) - 1 + len(drawn) >= request.prompt_ids[0] else None

    def _completion(self, name):
        reason, versions = self._reason(name), tuple(v for v in self.rows[name][1] if v != "abort")
        return Completion(name, (1,) * len(versions), (-1.0,) * len(versions), versions, reason)

    async def abort(self, ids):
        for name in ids:
            self.rows[name][1].append("abort")


class Shown:
    """The picture of a prompt, of its number and one token; no plain value."""

    def __init__(self, number):
        self.number, self.kept = number, SimpleNamespace(key=str(number))

    def load(self):
        patches = np.full((4, 12), self.number, np.float32)
        return PlacedPicture(Picture.of(patches, (1, 2, 2), merge=2, channels=3, frames=1), 0)


class Judge:
    def __init__(self, dull=()):
        self.dull = dull

    async def score(self, items):
        return [RewardResult(0.0 if item.prompt in self.dull else float(i)) for i, item in enumerate(items)]


def racing(lengths, *, engine=None, dull=(), times=None, **settings):
    prompts = [Prompt(f"p{n}", np.array([n], dtype=np.int32), f"p{n}", pictures=(Shown(n),)) for n in lengths]
    stream = ExampleStream(prompts, seed=0, shuffle=False)
    config = RolloutConfig(prompts_per_step=2, samples_per_prompt=2, over_sampling=2, **settings)
    sampler = Sampler(
        engine or Engine(), Judge(dull), TOKENIZER, PHASES,
        stop_token_ids=(0,), seed=0, limits=EpisodeLimits(), times=times,
    )  # fmt: skip
    return Racing(sampler, stream, PHASES, config)


def names(batch):
    return [group.prompt.id for group in batch.groups]


LENGTHS = (50, 3, 300, *range(4, 20))


def test_partial_rollouts_go_on_under_the_new_weights_with_a_version_for_each_token():
    async def go():
        engine = Engine()
        race = racing(LENGTHS, engine=engine, early_abort="continue")
        await race.advance(0)
        first = await race.take(1)
        begun = len(engine.asked)
        engine.version = 1
        await race.advance(1)
        second = await race.take(2)
        return first, second, engine.asked[begun:]

    first, second, asked = asyncio.run(go())
    assert names(first) == ["p3", "p4"]
    # The two that were stopped are asked for again, with the tokens that they have as context.
    again = [request for request in asked if request.prompt_ids[0] in (50, 300)]
    assert {request.prompt_ids[0] for request in again} == {50, 300}
    assert all(len(request.prompt_ids) > 1 for request in again)
    assert names(second) == ["p5", "p6"]


def test_every_prompt_is_trained_once_and_none_is_lost():
    async def go():
        race = racing(LENGTHS, early_abort="continue", partial_versions=100)
        seen = []
        for step in range(1, 5):
            await race.advance(step - 1)
            seen += names(await race.take(step))
        return seen, race.state()

    seen, state = asyncio.run(go())
    left = [f"p{LENGTHS[saved['number'] - 1]}" for saved in state["left"]]
    assert len(seen) == len(set(seen)) == 8
    # What was drawn is trained or still there.
    assert len(seen) + len(left) == state["drawn"]
    assert {"p50", "p300"} <= {*seen, *left}


def test_tokens_of_a_partial_rollout_carry_the_versions_that_drew_them():
    async def go():
        engine = Engine()
        race = racing((40, 2, 3), engine=engine, early_abort="continue", partial_versions=9)
        await race.advance(0)
        assert names(await race.take(1)) == ["p2", "p3"]
        engine.version = 1
        await race.advance(1)
        rows = []
        for step in (2, 3, 4, 5, 6):
            batch = await race.take(step)
            rows += [g for g in batch.groups if g.prompt.id == "p40"]
            if rows:
                return rows[0].members[0].trajectory
            await race.advance(step)
        raise AssertionError("the long one never ended")

    trajectory = asyncio.run(go())
    assert len(trajectory.token_ids) == 40
    assert sorted(trajectory.versions) == list(trajectory.versions)
    assert set(trajectory.versions) == {0, 1}


def test_restart_begins_anew_with_other_seeds():
    async def go():
        engine = Engine()
        race = racing(LENGTHS, engine=engine, early_abort="restart")
        await race.advance(0)
        await race.take(1)
        engine.version = 1
        await race.advance(1)
        await race.take(2)
        return [request for request in engine.asked if request.prompt_ids[0] == 50]

    asked = asyncio.run(go())
    assert [len(request.prompt_ids) for request in asked] == [1] * 4
    assert len({request.sampling.seed for request in asked}) == 4


def test_what_is_too_old_is_begun_anew():
    async def go():
        engine = Engine()
        race = racing(LENGTHS, engine=engine, early_abort="continue", partial_versions=1)
        await race.advance(0)
        await race.take(1)
        lengths = []
        for version in (1, 2):
            await race.advance(version)
            lengths.append([e.oldest_version for b in race._left for e in b.episodes])
        return lengths

    young, old = asyncio.run(go())
    assert young == [0] * 4
    assert old == [None] * 4


def test_a_saved_race_goes_on_with_the_tokens_and_pictures_it_has():
    async def first():
        race = racing(LENGTHS, early_abort="continue")
        await race.advance(0)
        await race.take(1)
        return json.loads(json.dumps(race.state())), left(race)

    async def second(state):
        race = racing(LENGTHS, early_abort="continue")
        race.load(state)
        await race.advance(1)
        return left(race), names(await race.take(2))

    def left(race):
        return [
            (b.prompt.id, [p.picture.patches().max() for p in e.request(0).pictures], e.turn_ids)
            for b in race._left
            for e in b.episodes
        ]

    state, before = asyncio.run(first())
    after, trained = asyncio.run(second(state))
    assert before == after
    assert [(name, shown) for name, shown, _ in after[::2]] == [("p50", [50]), ("p300", [300])]
    assert all(tokens for *_, tokens in after)
    assert trained == ["p5", "p6"]


def test_with_dynamic_sampling_only_useful_groups_end_the_race():
    async def go():
        race = racing(LENGTHS, early_abort="continue", dynamic_sampling=True, dull=("p3", "p5"))
        await race.advance(0)
        return await race.take(1)

    batch = asyncio.run(go())
    assert "p3" not in names(batch)
    assert len(batch.groups) == 2
    assert batch.dropped >= 1


@pytest.mark.parametrize("times", [TimeLimits(request_s=0.02), TimeLimits(group_s=0.02)])
def test_limits_of_time_end_completions_with_what_they_have(times):
    async def go():
        race = racing((10**6, 2), times=times, early_abort="restart")
        sampler, config = race._sampler, race._config
        prompts = [Prompt("p", np.array([10**6], dtype=np.int32), "p")]

        params = sampling_params(config, (0,))
        (group,) = await sampler.groups(prompts, params, samples_per_prompt=2, place=(1, 0))
        return group

    group = asyncio.run(asyncio.wait_for(go(), 5))
    for member in group.members:
        assert member.trajectory.finish_reason == "abort"
        assert 0 < len(member.trajectory.token_ids) < 1000
