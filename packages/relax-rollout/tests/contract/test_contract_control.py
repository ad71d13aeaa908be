"""Contract: pause, abort, memory, health, close."""

import asyncio

import pytest
from relax_rollout import EngineStateError, RolloutEngine

LONG = 300


def test_it_is_an_engine(harness):
    async def test(engine):
        return isinstance(engine, RolloutEngine)

    assert harness.run(test)


def test_health_counts_and_names(harness, ask, until):
    async def test(engine):
        idle = await engine.health()
        await engine.pause()
        task = asyncio.create_task(engine.generate([ask("a"), ask("b")]))
        await until(engine, lambda h: h.running + h.waiting == 2)
        paused = await engine.health()
        await engine.resume()
        await task
        return idle, paused, await engine.health()

    idle, paused, after = harness.run(test)
    assert idle.ready
    assert (idle.version, idle.running, idle.waiting, idle.updating, idle.last_error) == (0, 0, 0, None, None)
    assert (idle.device.partition(":")[0], idle.dtype) == harness.served
    assert paused.paused
    assert not after.paused
    assert (after.running, after.waiting) == (0, 0)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_paused_means_no_tokens_and_resume_changes_nothing(harness, ask, until, mode):
    request = ask(max_new_tokens=LONG)

    async def test(engine):
        task = asyncio.create_task(engine.generate([request]))
        await until(engine, lambda h: h.running == 1)
        await engine.pause(mode)
        await asyncio.sleep(0.3)
        assert not task.done()
        assert (await engine.health()).running + (await engine.health()).waiting == 1
        await engine.resume()
        return await task

    (interrupted,), (whole,) = harness.run(test), harness.generate([request])
    assert interrupted.token_ids == whole.token_ids
    assert interrupted.logprobs == pytest.approx(whole.logprobs, abs=harness.tolerance)


def test_pausing_can_end_what_is_in_flight(harness, ask, until):
    async def test(engine):
        task = asyncio.create_task(engine.generate([ask("a", max_new_tokens=LONG)]))
        await until(engine, lambda h: h.running == 1)
        await engine.pause("abort")
        ended = await asyncio.wait_for(task, 30)
        late = asyncio.create_task(engine.generate([ask("a", max_new_tokens=LONG)]))
        await asyncio.sleep(0.2)
        assert not late.done()
        await engine.resume()
        return ended, await late

    (cut,), (whole,) = harness.run(test)
    assert (cut.finish_reason, whole.finish_reason) == ("abort", "length")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) == len(cut.logprobs) == len(cut.versions) < LONG


def test_aborting_while_paused_keeps_the_tokens(harness, ask, until):
    async def test(engine):
        task = asyncio.create_task(engine.generate([ask(name, max_new_tokens=LONG) for name in "ab"]))
        await until(engine, lambda h: h.running > 0)
        # Once a short one that came later is done, these have tokens, and most of theirs still to come.
        await engine.generate([ask("short")])
        await engine.pause("recompute")
        await engine.abort(["a"])
        await engine.resume()
        return await task, await engine.generate([ask("a", max_new_tokens=LONG)])

    (cut, other), (whole,) = harness.run(test)
    assert other.finish_reason == "length"
    assert cut.finish_reason == "abort"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert 0 < len(cut.token_ids) == len(cut.logprobs) < LONG


def test_abort_ends_some_and_leaves_the_rest(harness, ask, until):
    async def test(engine):
        task = asyncio.create_task(engine.generate([ask(name, max_new_tokens=LONG) for name in "abc"]))
        await until(engine, lambda h: h.running == 3)
        await engine.abort(["b", "unknown"])
        return await task

    a, b, c = harness.run(test)
    assert (a.finish_reason, b.finish_reason, c.finish_reason) == ("length", "abort", "length")
    assert len(b.token_ids) < LONG
    assert len(b.token_ids) == len(b.logprobs) == len(b.versions)
    assert b.token_ids == a.token_ids[: len(b.token_ids)]


def test_abort_all_also_ends_what_waits(harness, ask, until):
    async def test(engine):
        await engine.pause()
        task = asyncio.create_task(engine.generate([ask("a"), ask("b")]))
        await until(engine, lambda h: h.running + h.waiting == 2)
        await engine.abort()
        completions = await task
        await engine.resume()
        return completions, await engine.generate([ask("a")])

    aborted, later = harness.run(test)
    assert [(c.token_ids, c.finish_reason) for c in aborted] == [((), "abort")] * 2
    assert later[0].finish_reason == "length"


def test_a_cancelled_call_frees_its_requests(harness, ask, until):
    async def test(engine):
        task = asyncio.create_task(engine.generate([ask("a", max_new_tokens=LONG)]))
        await until(engine, lambda h: h.running == 1)
        await engine.pause()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(until(engine, lambda h: h.running + h.waiting == 0), 10)
        await engine.resume()
        return await engine.generate([ask("a", max_new_tokens=2)])

    assert len(harness.run(test)[0].token_ids) == 2


def test_concurrent_calls_give_each_its_own(harness, mixed):
    parts = [mixed[n::4] for n in range(4)]

    async def test(engine):
        return await asyncio.gather(*(engine.generate(part) for part in parts))

    wanted = {c.request_id: c.token_ids for c in harness.generate(mixed)}
    for part, completions in zip(parts, harness.run(test), strict=True):
        assert [c.request_id for c in completions] == [r.id for r in part]
        assert all(c.token_ids == wanted[c.request_id] for c in completions)


def test_released_memory_refuses_requests_until_reclaimed(harness, ask):
    async def test(engine):
        before = await engine.generate([ask()])
        await engine.release_memory()
        assert not (await engine.health()).ready
        with pytest.raises(EngineStateError, match="released"):
            await engine.generate([ask()])
        with pytest.raises(EngineStateError, match="released"):
            await engine.begin_update(1)
        await engine.reclaim_memory()
        assert before == await engine.generate([ask()])

    harness.run(test)


def test_memory_in_use_is_not_released_unless_paused(harness, ask, until):
    request = ask(max_new_tokens=LONG)

    async def test(engine):
        task = asyncio.create_task(engine.generate([request]))
        await until(engine, lambda h: h.running == 1)
        with pytest.raises(EngineStateError, match="1 requests are running"):
            await engine.release_memory()
        await engine.pause()
        await engine.release_memory()
        await engine.reclaim_memory()
        await engine.resume()
        return await task

    (interrupted,), (whole,) = harness.run(test), harness.generate([request])
    assert interrupted.token_ids == whole.token_ids


def test_close_ends_what_is_in_flight_and_refuses_the_rest(harness, ask, until):
    async def test(engine):
        task = asyncio.create_task(engine.generate([ask(max_new_tokens=LONG)]))
        await until(engine, lambda h: h.running == 1)
        await engine.close()
        with pytest.raises(EngineStateError, match="closed while"):
            await task
        with pytest.raises(EngineStateError, match="closed"):
            await engine.generate([ask()])
        with pytest.raises(EngineStateError, match="closed"):
            await engine.begin_update(1)
        await engine.close()
        return await engine.health()

    assert not harness.run(test).ready
