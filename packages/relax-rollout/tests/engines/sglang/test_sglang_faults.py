"""What goes wrong between the engine and its servers: retried, caught up or refused, never a mix."""

import asyncio

import pytest
import torch
from relax_rollout import EngineError, EngineStateError, Request, SamplingParams, tensor_digest
from relax_rollout.engines.sglang import create

SHORT = {"call_timeout_s": 1.0}
"""For servers that hang."""
SHAPES = {"a.weight": (4, 3), "b.weight": (5,), "mtp.c.weight": (2, 2)}


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def ask(count=3, name="r"):
    return [Request(f"{name}{n}", (n + 1,), SamplingParams(max_new_tokens=4)) for n in range(count)]


def serve(stub, weights):
    return all(torch.equal(stub.model.weights[n.replace(".", "_")], t) for n, t in weights.items())


CALLS = ["begin", "receive", "commit", "/pause_generation", "/continue_generation", "status", "describe"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", ["502", "lost", "hang"])
def test_a_call_that_fails_once_is_made_again(stubs, run, weights, call, fault, update):
    stubs[1].faults[call] = [fault]

    async def test(engine):
        digests = await update(engine, weights)
        return digests, await engine.generate(ask())

    digests, completions = run(test, stubs, **SHORT)
    assert digests == {name: tensor_digest(tensor) for name, tensor in weights.items()}
    assert all(serve(stub, weights) for stub in stubs)
    assert {v for c in completions for v in c.versions} == {1}
    assert [stub.boots for stub in stubs] == [1, 1]


@pytest.mark.parametrize("call", ["receive", "commit", "/continue_generation"])
def test_a_server_that_restarts_in_the_middle_is_caught_up(stubs, run, weights, call, update):
    stubs[1].faults[call] = ["", "restart"] if call == "receive" else ["restart"]

    async def test(engine):
        await update(engine, weights)
        return await engine.generate(ask())

    completions = run(test, stubs, **SHORT)
    assert stubs[1].boots == 2
    assert all(serve(stub, weights) for stub in stubs)
    assert {v for c in completions for v in c.versions} == {1}


def test_a_server_that_restarts_between_updates_gets_the_weights_again(stubs, run, weights, update):
    async def test(engine):
        await update(engine, weights, version=7)
        stubs[0].boot()
        await engine.pause()
        await engine.resume()
        return await engine.generate(ask())

    completions = run(test, stubs, **SHORT)
    assert serve(stubs[0], weights)
    assert {v for c in completions for v in c.versions} == {7}


def test_without_kept_weights_a_restarted_server_waits_for_the_next_update(stubs, run, weights, update):
    async def test(engine):
        await update(engine, weights)
        stubs[0].boot()
        await engine.pause()
        await engine.resume()
        before = stubs[0].calls["/generate"]
        first = await engine.generate(ask())
        assert stubs[0].calls["/generate"] == before
        await update(engine, weights, version=2)
        return first, await engine.generate(ask())

    first, second = run(test, stubs, keep_weights=False, **SHORT)
    assert {v for c in first for v in c.versions} == {1}
    assert {v for c in second for v in c.versions} == {2}
    assert serve(stubs[0], weights)


def test_a_bucket_damaged_on_the_way_is_sent_again(stubs, run, weights, update):
    stubs[1].faults["receive"] = ["damage"]
    run(lambda engine: update(engine, weights), stubs, **SHORT)
    assert all(serve(stub, weights) for stub in stubs)


def test_a_bucket_always_damaged_is_refused_and_the_old_version_serves(stubs, run, weights, update):
    stubs[1].faults["receive"] = ["damage"] * 9

    async def test(engine):
        with pytest.raises(EngineError, match=r"received other bytes than were sent, 3 times: a\.weight"):
            await update(engine, weights)
        return await engine.generate(ask())

    completions = run(test, stubs, **SHORT)
    assert {v for c in completions for v in c.versions} == {0}
    assert not any(serve(stub, weights) for stub in stubs)


def test_other_values_than_were_sent_are_named_and_nothing_serves(stubs, run, weights, update):
    loads = stubs[1].model.load_weights

    def spoil(pairs):
        loads(pairs)
        stubs[1].model.weights["b_weight"].data.view(torch.int32)[3] ^= 1

    stubs[1].model.load_weights = spoil

    async def test(engine):
        with pytest.raises(EngineError, match=r"do not belong to it: server .*: weight b\.weight"):
            await update(engine, weights)
        assert not (await engine.health()).ready
        with pytest.raises(EngineStateError, match="serves no weights"):
            await engine.generate(ask())
        stubs[1].model.load_weights = loads
        await update(engine, weights, version=2)
        return await engine.generate(ask())

    # The fault is the loader's own.
    completions = run(test, stubs, replay=False, **SHORT)
    assert {v for c in completions for v in c.versions} == {2}


def test_a_server_that_stays_away_stops_the_update_with_the_reason(stubs, run, weights, update):
    stubs[1].faults["commit"] = ["502"] * 99

    async def test(engine):
        with pytest.raises(EngineError, match="lost too often"):
            await update(engine, weights)
        with pytest.raises(EngineStateError, match="serves no weights: the update to version 1 failed"):
            await engine.generate(ask())

    run(test, stubs, retries=0, **SHORT)


def test_requests_of_a_lost_server_are_drawn_again(stubs, run):
    stubs[0].faults["/generate"] = ["lost"]
    stubs[1].faults["/generate"] = ["502"]
    completions = run(lambda engine: engine.generate(ask(40)), stubs, **SHORT)
    assert [c.request_id for c in completions] == [f"r{n}" for n in range(40)]
    assert all(len(c.token_ids) == 4 for c in completions)


@pytest.mark.parametrize("fault", ["502", "lost", "hang"])
def test_memory_is_released_and_taken_back_once(stubs, run, fault):
    stubs[0].faults = {"/release_memory_occupation": [fault], "/resume_memory_occupation": [fault]}

    async def test(engine):
        await engine.release_memory()
        assert all(stub.released and stub.paused for stub in stubs)
        await engine.reclaim_memory()
        return await engine.generate(ask())

    assert len(run(test, stubs, **SHORT)) == 3
    assert not any(stub.released or stub.paused for stub in stubs)


@pytest.fixture
def device_memory(monkeypatch):
    """Stands for what a driver shares between processes: buffers by handle."""
    shared = {}

    def handle_of(buffer):
        shared[f"memory-{len(shared)}"] = buffer
        return f"memory-{len(shared) - 1}"

    monkeypatch.setattr("relax_rollout.weights.ipc.handle_of", handle_of)
    monkeypatch.setattr("relax_rollout.weights.ipc.open_handle", lambda handle, device: shared[handle])
    return shared


@pytest.mark.parametrize("replay", [False, True])
def test_weights_travel_as_device_memory(stubs, run, weights, device_memory, replay, update):
    lent = torch.arange(12.0)

    async def test(engine):
        engine.lend([lent])
        for version in (1, 2, 3):
            sent = {name: tensor * version for name, tensor in weights.items()}
            sent["a.weight"] = lent.mul_(version).view(4, 3)
            digests = await update(engine, sent, version)
            assert digests == {name: tensor_digest(tensor) for name, tensor in sent.items()}
            assert all(serve(stub, sent) for stub in stubs)
            if version == 2:
                # A server that restarts in the middle gets what was sent again: it is still there.
                stubs[1].faults["receive"] = ["", "restart"]
        return await engine.generate(ask())

    options = {"transport": "ipc", "device": "cuda", "replay": replay}
    completions = run(test, stubs, **options, **SHORT)
    assert {v for c in completions for v in c.versions} == {3}
    assert stubs[1].boots == 2
    # One buffer that was lent, and one for each bucket with another tensor; all updates use the same.
    assert len(device_memory) == 3


def test_the_next_bucket_is_taken_while_one_travels(stubs, run, weights):
    stubs[1].faults["receive"] = ["slow"]

    async def test(engine):
        await engine.begin_update(1)
        names = list(weights)
        clock = asyncio.get_running_loop().time
        start = clock()
        await engine.load({names[0]: weights[names[0]]})
        assert clock() - start < 0.5
        assert stubs[1].calls["receive"] == 0 or not engine._travelling.done()
        for name in names[1:]:
            await engine.load({name: weights[name]})
        return await engine.end_update()

    assert set(run(test, stubs, call_timeout_s=20.0)) == set(weights)
    assert all(serve(stub, weights) for stub in stubs)


def test_what_went_wrong_on_the_way_is_raised_by_the_next_call(stubs, run, weights):
    stubs[1].faults["receive"] = ["damage"] * 9

    async def test(engine):
        await engine.begin_update(1)
        await engine.load({"a.weight": weights["a.weight"]})
        with pytest.raises(EngineError, match="received other bytes than were sent"):
            await engine.load({"b.weight": weights["b.weight"]})
        with pytest.raises(EngineStateError, match="no update is open"):
            await engine.end_update()
        return await engine.generate(ask())

    assert {v for c in run(test, stubs, **SHORT) for v in c.versions} == {0}


def test_weights_travel_by_broadcast(stub_processes, run, weights, update):
    async def test(engine):
        await update(engine, weights)
        digests = await update(engine, {name: -tensor for name, tensor in weights.items()}, version=2)
        return digests, await engine.generate(ask())

    stubs = stub_processes({}, {"receive": ["", "", "", "", "hang"]})
    digests, completions = run(test, stubs, transport="broadcast", call_timeout_s=20.0)
    assert digests == {name: tensor_digest(-tensor) for name, tensor in weights.items()}
    assert {v for c in completions for v in c.versions} == {2}


def test_a_broadcast_that_loses_a_server_is_dropped_whole(stub_processes, run, weights, update):
    async def test(engine):
        with pytest.raises(EngineError, match="send"):
            await update(engine, weights)
        first = await engine.generate(ask())
        digests = await update(engine, weights, version=2)
        return first, digests, await engine.generate(ask())

    stubs = stub_processes({}, {"receive": ["", "restart"]})
    options = {"transport": "broadcast", "call_timeout_s": 4.0, "retries": 1}
    first, digests, second = run(test, stubs, **options)
    assert {v for c in first for v in c.versions} == {0}
    assert {v for c in second for v in c.versions} == {2}
    assert digests == {name: tensor_digest(tensor) for name, tensor in weights.items()}


def test_an_engine_that_cannot_start_says_what_to_install(checkpoint, monkeypatch):
    monkeypatch.setattr("relax_rollout.engines.sglang.launch.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed in this environment"):
        create(model=checkpoint)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"transport": "pigeon"}, "transport is 'pigeon'; allowed are auto, local, files, ipc, broadcast"),
        ({"servers": 0}, "servers is 0"),
        ({"call_timeout_s": 0}, "call_timeout_s is 0"),
        ({"device": "tpu"}, "cpu, cuda or npu"),
        ({"nonsense": 1}, "no option nonsense"),
    ],
)
def test_wrong_options_are_refused(checkpoint, option, words):
    with pytest.raises(ValueError, match=words):
        create(model=checkpoint, **option)
