"""Every path by which weights come to servers: chosen by trial, and never a mix, whatever fails."""

import asyncio
import logging

import pytest
import torch
from relax_rollout import EngineError, EngineStateError, Request, SamplingParams, TransferError, tensor_digest
from relax_rollout.weights.packing import Packing
from relax_rollout.weights.sender import WeightSender

SHAPES = {"a.weight": (4, 3), "b.weight": (5,), "mtp.c.weight": (2, 2)}
CPU = torch.device("cpu")


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


async def versions(engine):
    requests = [Request(f"r{n}", (n + 1,), SamplingParams(max_new_tokens=2)) for n in range(4)]
    return {v for c in await engine.generate(requests) for v in c.versions}


def digests(weights):
    return {name: tensor_digest(tensor) for name, tensor in weights.items()}


def serve(stub, weights):
    return all(torch.equal(stub.model.weights[n.replace(".", "_")], t) for n, t in weights.items())


@pytest.mark.parametrize(("shares", "chosen"), [(("memory", "file"), "ipc"), (("file",), "files")])
def test_the_first_path_that_works_at_every_server_is_taken(
    run, stubs, weights, caplog, shares, chosen, update
):
    caplog.set_level(logging.INFO)
    stubs[1].shares = shares
    stubs[0].faults["sees"] = ["502", "lost"]

    async def test(engine):
        return await update(engine, weights), await versions(engine), engine._way.transport

    assert run(test, stubs, transport="auto") == (digests(weights), {1}, chosen)
    assert f"weights travel by {chosen}: " in caplog.text


def test_local_alone_is_refused_where_nothing_is_shared_and_the_old_version_serves(
    run, stubs, weights, update
):
    stubs[1].shares = ()

    async def test(engine):
        with pytest.raises(EngineError, match="it runs on another host, or in a container of its own"):
            await update(engine, weights)
        return await versions(engine)

    assert run(test, stubs, transport="local") == {0}
    assert not any(serve(stub, weights) for stub in stubs)


@pytest.mark.parametrize("call", ["begin", "receive", "commit", "/pause_generation", "/continue_generation"])
@pytest.mark.parametrize("fault", ["502", "lost"])
def test_shared_memory_survives_a_call_that_fails_once(run, stubs, weights, call, fault, update):
    stubs[1].faults[call] = [fault]

    async def test(engine):
        served = []
        for version in (1, 2):
            served.append(await update(engine, {n: version * t for n, t in weights.items()}, version))
        return served, await versions(engine)

    (_, served), seen = run(test, stubs, transport="ipc")
    assert (served, seen) == (digests({n: 2 * t for n, t in weights.items()}), {2})
    assert [stub.boots for stub in stubs] == [1, 1]


def test_shared_memory_survives_a_hung_server_and_one_that_restarts_between_buckets(
    run, stubs, weights, update
):
    stubs[0].faults["receive"] = ["", "restart"]
    stubs[1].faults["commit"] = ["hang"]

    async def test(engine):
        return await update(engine, weights), await versions(engine)

    assert run(test, stubs, transport="ipc", call_timeout_s=1.0) == (digests(weights), {1})
    assert stubs[0].boots == 2
    assert all(serve(stub, weights) for stub in stubs)


def test_a_server_that_restarts_between_updates_reads_the_memory_again(run, stubs, weights, update):
    async def test(engine):
        await update(engine, weights, version=7)
        stubs[0].boot()
        await engine.pause()
        await engine.resume()
        return await versions(engine)

    assert run(test, stubs, transport="ipc") == {7}
    assert serve(stubs[0], weights)


def test_a_byte_that_flips_in_shared_memory_is_noticed_and_sent_again(run, stubs, weights, update):
    stubs[1].faults["receive"] = ["damage"]
    run(lambda engine: update(engine, weights), stubs, transport="ipc")
    assert all(serve(stub, weights) for stub in stubs)


def test_memory_always_damaged_is_refused_and_the_old_version_serves(run, stubs, weights, update):
    stubs[1].faults["receive"] = ["damage"] * 9
    stubs[0].faults["discard"] = ["502", "lost"]

    async def test(engine):
        with pytest.raises(TransferError, match=r"received other bytes than were sent, 3 times: a\.weight"):
            await update(engine, weights)
        return await versions(engine)

    assert run(test, stubs, transport="ipc") == {0}
    assert not any(serve(stub, weights) for stub in stubs)


def test_servers_that_share_nothing_take_a_broadcast_which_survives_calls_that_fail(
    run, stub_processes, weights, caplog, update
):
    """Asked again, a server that has taken part already says so instead of waiting for another broadcast."""
    caplog.set_level(logging.INFO)
    calls = ("begin", "connect", "receive", "commit", "/pause_generation", "/continue_generation")

    async def test(engine):
        served = []
        for version in (1, 2):
            served.append(await update(engine, {n: version * t for n, t in weights.items()}, version))
        return served, await versions(engine)

    stubs = stub_processes({"shares": []}, {call: ["502", "lost"] for call in calls})
    (_, served), seen = run(test, stubs, transport="auto", call_timeout_s=60.0)
    assert (served, seen) == (digests({n: 2 * t for n, t in weights.items()}), {2})
    assert "weights travel by broadcast: a server sees neither" in caplog.text


def packer_of(path, folder):
    """Gives the buckets of some weights, and what gives them up."""
    if path == "ipc":
        packing = Packing(CPU)
        return (lambda given, dtypes: packing(lambda: [given], dtypes)), packing.close
    sender = WeightSender(path, folder=folder)

    def pack(given, dtypes):
        sender.begin()
        return [sender.pack({name: tensor}, dtypes) for name, tensor in given.items()]

    return pack, sender.close


async def pack_elsewhere(engine, pack, weights, version):
    dtypes = await engine.begin_update(version)
    for bucket in pack({name: tensor.double() for name, tensor in weights.items()}, dtypes):
        await engine.load_packed([bucket])
    return await engine.end_update()


@pytest.mark.parametrize("path", ["ipc", "disk"])
def test_what_another_process_packed_is_opened_by_the_servers(run, stubs, weights, tmp_path, path):
    """Also by one that restarts, as long as it is there."""
    stubs[0].faults["receive"] = ["restart"] if path == "ipc" else ["", "restart"]
    pack, close = packer_of(path, tmp_path / "weights")

    async def test(engine):
        served = [await pack_elsewhere(engine, pack, weights, 1)]
        served.append(await pack_elsewhere(engine, pack, {n: -t for n, t in weights.items()}, 2))
        stubs[1].boot()
        await engine.pause()
        await engine.resume()
        seen = await versions(engine)
        both = serve(stubs[1], {n: -t for n, t in weights.items()})
        # The sender writes the next weights: a server that is lost now waits for the update.
        pack(weights, {})
        stubs[0].boot()
        await engine.pause()
        await engine.resume()
        before = stubs[0].calls["/generate"]
        seen |= await versions(engine)
        return served, seen, both, stubs[0].calls["/generate"] - before

    try:
        served, seen, both, drawn = run(test, stubs)
    finally:
        close()
    assert served == [digests(weights), digests({n: -t for n, t in weights.items()})]
    assert (seen, both, drawn) == ({2}, True, 0)
    assert not list((tmp_path / "weights").glob("*/*"))


def test_servers_take_part_in_anothers_broadcast(run, stub_processes, weights):
    """One that goes wrong leaves the old version; the next one, in a group made anew, goes through."""
    sender = WeightSender("broadcast")

    async def broadcast(engine, *, damage=False):
        dtypes = await engine.begin_update(2)
        meeting = sender.offer("127.0.0.1", 1 + engine.receivers, "gloo", 20.0)
        await asyncio.gather(asyncio.to_thread(sender.meet, CPU), engine.connect(meeting, 1))
        for name, tensor in weights.items():
            sent = tensor.clone()
            bucket = sender.pack({name: sent}, dtypes)
            sent += damage
            await asyncio.gather(engine.load_packed([bucket]), asyncio.to_thread(sender.send))
        return await engine.end_update()

    async def test(engine):
        with pytest.raises(TransferError, match="other bytes than were sent"):
            await broadcast(engine, damage=True)
        with pytest.raises(TransferError, match="did not reach"):
            await broadcast(engine)
        first = await versions(engine)
        with pytest.raises(EngineStateError, match="no update is open"):
            await engine.end_update()
        return first, await broadcast(engine), await versions(engine)

    # The second broadcast loses a server between two of its buckets.
    stubs = stub_processes({}, {"receive": ["", "", "restart"]})
    assert run(test, stubs, retries=1) == ({0}, digests(weights), {2})
