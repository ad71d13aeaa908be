"""Several engines as one, with actors that are plain objects here."""

import asyncio
import random
from itertools import count

import numpy as np
import pytest
from ray.exceptions import RayActorError
from relax_core.cluster import engines as engines_module
from relax_core.cluster.engines import EngineGroup
from relax_core.cluster.errors import ClusterError, EnginesLostError, WeightsGoneError
from relax_rollout import (
    Completion,
    EngineStateError,
    Request,
    SamplingParams,
    TransferError,
    WeightsLostError,
    WeightUpdateError,
)
from relax_rollout.pictures import Picture, PlacedPicture


class Method:
    """`actor.method.remote(...)`, answered by a coroutine; dies with its engine."""

    def __init__(self, engine, call):
        self._engine, self._call = engine, call

    async def _run(self, *arguments):
        self._engine.alive()
        running = asyncio.ensure_future(self._answer(*arguments))
        dying = asyncio.ensure_future(self._engine.dead.wait())
        await asyncio.wait([running, dying], return_when=asyncio.FIRST_COMPLETED)
        self._engine.alive()
        dying.cancel()
        return await running

    async def _answer(self, *arguments):
        answer = await self._call(*arguments)
        if self._engine.hanging:
            await asyncio.Event().wait()
        return answer

    def remote(self, *arguments):
        return self._run(*arguments)


class Engine:
    """Answers each request with its version once `gate` is open."""

    def __init__(self, number, log):
        self.number, self.log = number, log
        self.version, self.released = 0, False
        self.dead, self.gate = asyncio.Event(), asyncio.Event()
        self.loaded = []
        self.digest = None
        self.hanging = self.losing = False

    def alive(self):
        if self.dead.is_set():
            raise RayActorError(error_msg="killed")

    def hang(self):
        """Answers nothing from here on, until it is ended."""
        self.hanging = True

    def __getattr__(self, name):
        return Method(self, getattr(self, f"_{name}"))

    async def _pid(self):
        return self.number

    async def _generate(self, requests):
        if self.released:
            raise EngineStateError("released")
        self.log.append((self.number, [request.id for request in requests]))
        await self.gate.wait()
        return [
            Completion(request.id, (self.number,), (0.0,), (self.version,), "stop") for request in requests
        ]

    async def _begin_update(self, version, kept=()):
        self.loaded, self.coming = [], version
        return {"w": "float32"}

    async def _load(self, bucket):
        self.loaded.append(bucket)

    async def _load_packed(self, parts):
        if self.losing:
            raise TransferError("other bytes arrived")
        self.loaded += parts

    async def _receivers(self):
        return 1

    async def _connect(self, meeting, first_rank):
        self.rank = first_rank

    async def _end_update(self):
        self.version = self.coming
        return {"w": self.digest or "".join(self.loaded)}

    async def _release_memory(self):
        self.log.append((self.number, "released"))
        self.released = True

    async def _abort(self, ids):
        pass

    async def _pause(self, mode):
        pass

    async def _resume(self):
        pass

    async def _reclaim_memory(self):
        self.released = False


class Host:
    """Starts engines and remembers them."""

    def __init__(self, *, count=2, max_restarts=2, timeout_s=60.0):
        self.log = []
        self.engines = {}
        self.starts = []
        self.ended = []
        self.group = EngineGroup(
            self.start, count, max_restarts=max_restarts, timeout_s=timeout_s, end=self.end
        )

    def end(self, engine):
        self.ended.append(engine.number)
        engine.dead.set()

    def start(self, number):
        self.starts.append(number)
        self.engines[number] = Engine(number, self.log)
        return self.engines[number]


def requests(*prompts):
    return [Request(f"{p}.{i}", (p,), SamplingParams(1)) for p in prompts for i in range(2)]


async def settle():
    for _ in range(30):
        await asyncio.sleep(0)


async def update(group, version, *buckets):
    dtypes = await group.begin_update(version)
    for bucket in buckets:
        await group.load_shared(bucket)
    return dtypes, await group.end_update()


async def update_packed(group, version, *buckets, broadcast=False):
    """Buckets that a rank has packed, which are gone once the update has ended."""
    dtypes = await group.begin_update(version)
    for bucket in buckets:
        await group.load_packed({n: [bucket] for n, _ in group.updated}, broadcast=broadcast)
    return dtypes, await group.end_update()


class Trainer:
    """Gives the weights of `version` again while it is not `busy`."""

    def __init__(self, group):
        self.version, self.busy = 0, False
        group.again = self.again

    async def again(self, version):
        if self.busy or version != self.version:
            raise WeightsGoneError("busy")
        for part in (str(version), "."):
            yield part


def test_the_members_of_a_prompt_go_to_one_engine_and_answers_keep_the_order():
    async def go():
        host = Host()
        for engine in host.engines.values():
            engine.gate.set()
        asked = requests(1, 2, 3)
        answers = await host.group.generate(asked)
        assert [a.request_id for a in answers] == [r.id for r in asked]
        return [ids for _, ids in host.log]

    assert asyncio.run(go()) == [["1.0", "1.1", "3.0", "3.1"], ["2.0", "2.1"]]


def test_prompts_of_one_text_and_several_pictures_are_spread_by_picture():
    grid = (1, 2, 2)
    patches = np.zeros((4, 12), np.float32)
    pictures = [Picture.of(patches, grid, merge=2, channels=3, frames=1) for _ in range(2)]
    asked = [
        Request(f"{n}.{i}", (7, 7), SamplingParams(1), pictures=(PlacedPicture(picture, 0),))
        for n, picture in enumerate(pictures)
        for i in range(2)
    ]

    async def go():
        host = Host()
        for engine in host.engines.values():
            engine.gate.set()
        await host.group.generate(asked)
        return [ids for _, ids in host.log]

    assert asyncio.run(go()) == [["0.0", "0.1"], ["1.0", "1.1"]]


def test_a_dead_engine_comes_back_with_the_weights_of_the_others_which_go_on():
    async def go():
        host = Host()
        await update(host.group, 4, "a", "b")
        asking = asyncio.create_task(host.group.generate(requests(1, 2)))
        await settle()
        host.engines[1].dead.set()
        host.engines[0].gate.set()
        await settle()
        # The first engine answered its own part and took over the other's.
        answers = await asking
        assert [a.token_ids for a in answers] == [(0,)] * 4
        assert host.starts == [0, 1, 1]
        assert host.engines[1].version == 4
        assert host.engines[1].loaded == ["a", "b"]
        assert await host.group.pids() == [0, 1]

    asyncio.run(go())


def test_an_engine_that_was_started_anew_is_told_apart_wherever_its_handle_lies():
    """It is in no group that the one before it had joined."""

    async def go():
        host, seen = Host(), []
        for version in (1, 2, 3):
            await host.group.begin_update(version)
            seen.append(host.group.updated)
            await host.group.load_shared("w")
            await host.group.end_update()
            host.engines[1].dead.set()
            await host.group.pids()
            await settle()
        return seen

    assert asyncio.run(asyncio.wait_for(go(), 100)) == [[(0, 1), (1, n)] for n in (1, 2, 3)]


def test_an_engine_that_dies_during_an_update_gets_what_came_of_it():
    async def go():
        host = Host()
        await update(host.group, 1, "old")
        await host.group.begin_update(2)
        await host.group.load_shared("new")
        host.engines[1].dead.set()
        await host.group.load_shared("er")
        assert await host.group.end_update() == {"w": "newer"}
        await settle()
        assert [engine.version for engine in host.engines.values()] == [2, 2]
        assert host.engines[1].loaded == ["new", "er"]

    asyncio.run(go())


def test_engines_that_serve_different_values_are_found_and_so_is_one_that_came_back_wrong():
    async def go():
        host = Host()
        host.engines[1].digest = "flipped"
        with pytest.raises(WeightUpdateError, match="engines 0 and 1 serve different values of w"):
            await update(host.group, 1, "a")
        host.engines[1].digest = None
        await update(host.group, 1, "a")
        host.engines[0].dead.set()
        flawed = Engine(0, host.log)
        flawed.digest = "flipped"
        host.group._members._start = lambda number: flawed
        host.engines[1].gate.set()
        await host.group.generate(requests(1, 2))
        await settle()
        with pytest.raises(ClusterError, match="given version 1 once more and serves other values"):
            await host.group.generate(requests(1, 2))

    asyncio.run(go())


def test_an_engine_that_keeps_dying_ends_the_run():
    async def go():
        host = Host(count=1, max_restarts=2)
        dying = host.start

        def start(number):
            engine = dying(number)
            engine.dead.set()
            return engine

        host.group._members._start = start
        host.engines[0].dead.set()
        with pytest.raises(ClusterError, match="died 3 times since the last update"):
            await host.group.generate(requests(1))

    asyncio.run(go())


def test_a_late_request_is_not_scheduled_on_released_memory():
    async def go():
        host = Host(count=1)
        (engine,) = host.engines.values()
        early = asyncio.create_task(host.group.generate(requests(1)))
        await settle()
        releasing = asyncio.create_task(host.group.release_memory())
        late = asyncio.create_task(host.group.generate(requests(2)))
        await settle()
        assert host.log == [(0, ["1.0", "1.1"])]
        engine.gate.set()
        await releasing
        await early
        later = asyncio.create_task(host.group.generate(requests(3)))
        await settle()
        assert host.log[1:] == [(0, "released")]
        assert not late.done()
        await host.group.reclaim_memory()
        await asyncio.gather(late, later)
        assert host.log[2:] == [(0, ["2.0", "2.1"]), (0, ["3.0", "3.1"])]

    asyncio.run(go())


def test_an_engine_that_dies_while_the_trainer_has_the_device_starts_when_it_is_free_again():
    async def go():
        host = Host()
        await host.group.release_memory()
        host.engines[0].dead.set()
        await host.group.abort([])
        await settle()
        assert host.starts == [0, 1]
        await host.group.reclaim_memory()
        await settle()
        assert host.starts == [0, 1, 0]

    asyncio.run(go())


def test_an_engine_that_hangs_while_it_samples_is_noticed_and_its_requests_go_elsewhere():
    async def go():
        host = Host(timeout_s=0.2)
        await host.group.open()
        await update(host.group, 3, "a")
        host.engines[0].hang()
        for engine in host.engines.values():
            engine.gate.set()
        answers = await asyncio.wait_for(host.group.generate(requests(1, 2)), 5)
        assert [a.token_ids for a in answers] == [(1,)] * 4
        assert host.ended == [0]
        await settle()
        assert host.engines[0].version == 3
        assert await host.group.pids() == [0, 1]
        await host.group.close()

    asyncio.run(go())


def test_an_engine_that_hangs_during_an_update_gets_what_came_of_it():
    async def go():
        host = Host(timeout_s=0.2)
        await update(host.group, 1, "old")
        await host.group.begin_update(2)
        host.engines[1].hang()
        await host.group.load_shared("new")
        assert await host.group.end_update() == {"w": "new"}
        await settle()
        assert host.ended == [1]
        assert [engine.version for engine in host.engines.values()] == [2, 2]

    asyncio.run(go())


def test_an_engine_that_dies_while_it_rests_comes_back_when_the_others_wake():
    async def go():
        host = Host(count=3)
        await update(host.group, 1, "a")
        for engine in host.engines.values():
            engine.gate.set()
        await host.group.rest(1)
        host.engines[0].dead.set()
        # Requests go to the engines that have devices of their own.
        answers = await host.group.generate(requests(1, 2, 3))
        assert {a.token_ids for a in answers} == {(1,), (2,)}
        await host.group.wake()
        await settle()
        assert host.starts == [0, 1, 2, 0]
        assert host.engines[0].version == 1
        assert sorted(await host.group.pids()) == [0, 1, 2]

    asyncio.run(go())


def test_an_engine_that_has_lost_weights_which_nobody_kept_is_given_them_again():
    async def go():
        host = Host()
        trainer = Trainer(host.group)
        await update_packed(host.group, 1, "1.")
        trainer.version = 1
        host.engines[0].gate.set()
        host.engines[1].dead.set()
        await host.group.abort([])
        await settle()
        assert host.engines[1].version == 1

    asyncio.run(go())


def test_while_the_trainer_is_busy_it_takes_no_requests_and_the_next_update_takes_it_along(monkeypatch):
    monkeypatch.setattr("relax_core.cluster.engines._RETRY_S", 0)

    async def go():
        host = Host(count=1)
        trainer = Trainer(host.group)
        trainer.busy = True
        await update_packed(host.group, 1, "1.")
        host.engines[0].dead.set()
        await host.group.abort([])
        asking = asyncio.create_task(host.group.generate(requests(1)))
        await settle()
        host.engines[0].gate.set()
        assert (host.starts, host.engines[0].version, host.log) == ([0, 0], 0, [])
        assert (await update_packed(host.group, 2, "2."))[1] == {"w": "2."}
        assert [a.versions for a in await asking] == [(2,), (2,)]
        assert host.engines[0].version == 2

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("how", ["release_memory", "rest"])
def test_memory_is_given_up_while_an_engine_waits_for_weights_that_the_trainer_cannot_give(monkeypatch, how):
    monkeypatch.setattr("relax_core.cluster.engines._RETRY_S", 0)

    async def go():
        host = Host(count=2)
        trainer = Trainer(host.group)
        trainer.busy = True
        await update_packed(host.group, 1, "1.")
        host.engines[0].dead.set()
        await host.group.abort([])
        await settle()
        await (host.group.rest(1) if how == "rest" else host.group.release_memory())
        trainer.busy, trainer.version = False, 1
        await settle()
        # Weights could be had now, but there is no memory for them.
        assert (host.starts, host.engines[0].version) == ([0, 1, 0], 0)
        await (host.group.wake() if how == "rest" else host.group.reclaim_memory())
        await settle()
        assert host.engines[0].version == 1

    asyncio.run(asyncio.wait_for(go(), 60))


def test_an_engine_whose_servers_came_back_empty_gets_its_weights_without_a_start():
    async def go():
        host = Host(count=1)
        trainer = Trainer(host.group)
        await update_packed(host.group, 1, "1.")
        trainer.version = 1
        (engine,) = host.engines.values()
        engine.gate.set()
        engine.version, answers = 0, engine._generate

        async def empty(asked):
            engine._generate = answers
            raise WeightsLostError("every server was restarted")

        engine._generate = empty
        assert {a.versions for a in await host.group.generate(requests(1))} == {(1,)}
        assert host.starts == [0]

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("fault", ["loses", "dies"])
def test_a_bucket_that_does_not_reach_every_engine_leaves_the_old_version_on_all(fault):
    async def go():
        host = Host()
        trainer = Trainer(host.group)
        await update_packed(host.group, 1, "1.", broadcast=True)
        trainer.version = 1
        assert [engine.rank for engine in await connected(host)] == [1, 2]
        await host.group.begin_update(2)
        if fault == "loses":
            host.engines[1].losing = True
        else:
            host.engines[1].dead.set()
        with pytest.raises(TransferError):
            await host.group.load_packed({0: ["2."], 1: ["2."]}, broadcast=True)
        await settle()
        assert [engine.version for engine in host.engines.values()] == [1, 1]
        host.engines[1].losing = False
        await update_packed(host.group, 2, "2.", broadcast=True)
        assert [engine.version for engine in host.engines.values()] == [2, 2]

    async def connected(host):
        await host.group.begin_update(2)
        assert await host.group.receivers() == 2
        await host.group.connect(None)
        host.group.drop_update()
        return host.engines.values()

    asyncio.run(asyncio.wait_for(go(), 60))


class Meeting:
    """Those who join wait until somebody gives it up."""

    def __init__(self, loop):
        self._loop, self.over = loop, asyncio.Event()

    def give_up(self):
        self._loop.call_soon_threadsafe(self.over.set)


def test_none_waits_for_an_engine_that_dies_before_it_has_joined_the_group(monkeypatch):
    async def connect(engine, meeting, first_rank):
        if engine.number == 1:
            engine.dead.set()
        await meeting.over.wait()
        raise TransferError("one of the processes has ended")

    async def go():
        host = Host(count=3)
        await host.group.begin_update(1)
        monkeypatch.setattr(Engine, "_connect", connect)
        with pytest.raises(TransferError):
            await host.group.connect(Meeting(asyncio.get_running_loop()))
        await settle()
        return host.starts

    # The one that died alone is started anew.
    assert asyncio.run(asyncio.wait_for(go(), 100)) == [0, 1, 2, 1]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_whoever_dies_or_hangs_whenever_every_request_is_answered_once_under_one_version(
    seed, kept, monkeypatch
):
    """Engines die and hang at random moments while requests are sampled and weights updated.

    Where nobody keeps the weights the trainer gives them again, when it is not busy.
    """
    monkeypatch.setattr("relax_core.cluster.engines._RETRY_S", 0.005)
    rng = random.Random(seed)

    async def go():
        host = Host(count=3, max_restarts=1000, timeout_s=0.05)
        trainer = Trainer(host.group)
        send = update if kept else update_packed
        before = Engine._generate

        async def generate(engine, asked):
            engine.gate.set()
            await asyncio.sleep(rng.random() * 0.02)
            return await before(engine, asked)

        host_engines = host.engines
        Engine._generate = generate
        try:
            await host.group.open()
            done, last = asyncio.Event(), 6

            async def kill():
                while not done.is_set():
                    await asyncio.sleep(rng.random() * 0.03)
                    engine = host_engines[rng.randrange(3)]
                    rng.choice([engine.dead.set, engine.hang])()

            async def ask(number):
                await asyncio.sleep(rng.random() * 0.3)
                asked = requests(*(100 * number + k for k in range(1 + rng.randrange(4))))
                answers = await host.group.generate(asked)
                assert [a.request_id for a in answers] == [r.id for r in asked]
                return [version for a in answers for version in a.versions]

            async def train():
                for version in range(1, last + 1):
                    while True:
                        try:
                            trainer.busy = True
                            answer = await send(host.group, version, f"{version}", ".")
                            assert answer[1] == {"w": f"{version}."}
                            trainer.version, trainer.busy = version, rng.random() < 0.5
                            break
                        except EnginesLostError:
                            continue
                    await asyncio.sleep(rng.random() * 0.05)
                trainer.busy = False

            killer = asyncio.create_task(kill())
            versions, _ = await asyncio.gather(asyncio.gather(*map(ask, range(30))), train())
            done.set()
            await killer
            assert {v for row in versions for v in row} <= set(range(last + 1))
            # What is left of the dying is made up for, and everybody serves the last version.
            await host.group.generate(requests(1))
            for _ in range(200):
                if len(await host.group.pids()) == 3:
                    break
                await asyncio.sleep(0.01)
            assert [engine.version for engine in host_engines.values()] == [last] * 3
            await host.group.close()
        finally:
            Engine._generate = before

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("sampling", [False, True])
def test_an_update_is_exposed_while_nothing_samples_or_while_engines_are_asked(monkeypatch, sampling):
    host = Host()

    async def go():
        tasks = [asyncio.create_task(host.group.generate(requests(5)))] if sampling else []
        while sampling and not host.log:
            await asyncio.sleep(0)
        # A clock that goes a second each time somebody looks: every call takes one.
        seconds = count()
        monkeypatch.setattr(engines_module.time, "perf_counter", lambda: float(next(seconds)))
        await host.group.begin_update(1)
        await host.group.load_shared("one")
        await host.group.load_shared("two")
        await host.group.end_update()
        monkeypatch.undo()
        for engine in host.engines.values():
            engine.gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(go())
    assert host.group.exposed(10.0) == (4.0 if sampling else 10.0)
    assert host.group.exposed(3.0) == 3.0
