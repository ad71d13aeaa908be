"""Colocated roles take turns on the memory: a real engine behind the group, without a cluster."""

import asyncio

import pytest
from relax_core.cluster.engines import EngineGroup
from relax_rollout import EngineStateError, Request, SamplingParams, create_engine


class Here:
    """An actor that is an engine of this process: `actor.method.remote(...)`."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        async def pid():
            return 0

        call = pid if name == "pid" else getattr(self.engine, name)
        return type("Method", (), {"remote": staticmethod(call)})


def request(name, tokens):
    return Request(name, (5, 6, 7), SamplingParams(max_new_tokens=tokens, seed=3))


@pytest.fixture
def engine(small_model):
    return create_engine("transformers", model=small_model)


def test_requests_drain_before_memory_is_released_and_late_ones_wait_for_it(engine):
    async def go():
        group = EngineGroup(lambda number: Here(engine), 1, max_restarts=0, end=lambda actor: None)
        early = asyncio.create_task(group.generate([request("early", 60)]))
        while (await engine.health()).running == 0:
            await asyncio.sleep(0)
        releasing = asyncio.create_task(group.release_memory())
        await asyncio.sleep(0)
        late = asyncio.create_task(group.generate([request("late", 2)]))
        await releasing
        # The barrier: what was in flight has come to its own end, and nothing was let in behind it.
        (whole,) = await early
        assert (whole.finish_reason, len(whole.token_ids)) == ("length", 60)
        health = await engine.health()
        assert (health.released, health.running, health.waiting) == (True, 0, 0)
        later = asyncio.create_task(group.generate([request("later", 2)]))
        await asyncio.sleep(0.05)
        assert not late.done()
        assert not later.done()
        # The engine itself would have refused them: it is the gate that holds them back.
        with pytest.raises(EngineStateError, match="released"):
            await engine.generate([request("rude", 1)])
        await group.reclaim_memory()
        (first,), (second,) = await asyncio.gather(late, later)
        assert first.token_ids == second.token_ids == whole.token_ids[:2]
        await engine.close()

    asyncio.run(asyncio.wait_for(go(), 120))


def test_requests_of_a_resting_engine_go_on_where_they_were(engine, small_model):
    """Hybrid: an engine rests in the middle of a completion, which then ends as if nothing had happened."""

    async def go():
        group = EngineGroup(lambda number: Here(engine), 1, max_restarts=0, end=lambda actor: None)
        (alone,) = await group.generate([request("alone", 40)])
        task = asyncio.create_task(group.generate([request("rested", 40)]))
        while (await engine.health()).running == 0:
            await asyncio.sleep(0)
        await group.rest(1)
        assert (await engine.health()).released
        await asyncio.sleep(0.05)
        assert not task.done()
        await group.wake()
        (rested,) = await task
        assert rested.token_ids == alone.token_ids
        await engine.close()

    asyncio.run(asyncio.wait_for(go(), 120))
