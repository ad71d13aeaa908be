"""A router in front of the servers: a stand-in by URL, and sglang-router itself where it is installed."""

import asyncio
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from relax_rollout import EngineError, Request, SamplingParams
from relax_rollout.engines.sglang import create

SHAPES = {"a.weight": (4, 3), "b.weight": (5,), "mtp.c.weight": (2, 2)}
REAL = find_spec("sglang_router") is not None or os.environ.get("RELAX_TEST_SGLANG") == "1"


@pytest.fixture(
    params=["stand-in", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="no router"))]
)
def kind(request):
    return request.param


def ask(count, length=4):
    return [Request(f"r{n}", (n % 4000 + 1, 7), SamplingParams(max_new_tokens=length)) for n in range(count)]


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def whole(requests, completions):
    """Each answer is its own request's, whole."""
    return [(c.request_id, c.token_ids) for c in completions] == [
        (r.id, (r.prompt_ids[0],) * r.sampling.max_new_tokens) for r in requests
    ]


def run(test, kind, make_router, urls, checkpoint, **options):
    settings = {"call_timeout_s": 20.0, "retries": 2, "start_timeout_s": 100, "folder": checkpoint} | options

    async def body():
        router = "start" if kind == "real" else make_router(urls)
        engine = create(model=checkpoint, urls=urls, router=router, **settings)
        try:
            return await asyncio.wait_for(test(engine), 200)
        finally:
            await engine.close()

    return asyncio.run(body())


async def update(engine, version, restart=None):
    await engine.begin_update(version)
    await engine.load({name: torch.full(shape, float(version)) for name, shape in SHAPES.items()})
    return await engine.end_update()


def test_requests_are_shared_out_and_control_calls_go_to_every_server(kind, make_router, stubs, checkpoint):
    requests = ask(8)

    async def test(engine):
        await update(engine, 3)
        return await engine.generate(requests)

    completions = run(test, kind, make_router, [stub.url for stub in stubs], checkpoint)
    assert whole(requests, completions)
    assert {v for c in completions for v in c.versions} == {3}
    assert [stub.calls["/generate"] for stub in stubs] == [4, 4]
    assert [stub.calls["commit"] for stub in stubs] == [1, 1]


@pytest.mark.parametrize("fault", ["502", "lost"])
def test_a_request_that_is_lost_behind_the_router_is_drawn_again(kind, make_router, stubs, checkpoint, fault):
    stubs[1].faults["/generate"] = [fault] * 2
    requests = ask(12)
    completions = run(
        lambda engine: engine.generate(requests), kind, make_router, [s.url for s in stubs], checkpoint
    )
    assert whole(requests, completions)
    assert sum(stub.calls["/generate"] for stub in stubs) == 14


def test_aborting_reaches_the_server_wherever_the_router_sent_a_request(kind, make_router, stubs, checkpoint):
    for stub in stubs:
        stub.delay_s = 1.0

    async def test(engine):
        task = asyncio.create_task(engine.generate(ask(2)))
        while sum(stub.calls["/generate"] for stub in stubs) < 2:
            await asyncio.sleep(0.02)
        await engine.abort(["r1"])
        return await task

    run(test, kind, make_router, [stub.url for stub in stubs], checkpoint)
    assert [stub.calls["/abort_request"] for stub in stubs] == [1, 1]


def test_a_server_without_the_present_weights_gets_no_requests(kind, make_router, stubs, checkpoint):
    async def test(engine):
        await update(engine, 1)
        stubs[0].boot()
        stubs[1].faults["/generate"] = ["lost"]
        before = stubs[0].calls["/generate"]
        # A lost request makes the engine look after its servers: the restarted one is left out afterwards.
        await engine.generate(ask(2))
        drawn = await engine.generate(ask(6))
        between = stubs[0].calls["/generate"] - before
        await update(engine, 2)
        return between, drawn, await engine.generate(ask(6))

    between, drawn, later = run(
        test, kind, make_router, [stub.url for stub in stubs], checkpoint, keep_weights=False
    )
    assert between <= 1
    assert {v for c in drawn for v in c.versions} == {1}
    assert {v for c in later for v in c.versions} == {2}
    assert stubs[0].calls["/generate"] > between


@pytest.mark.skipif(not REAL, reason="no router")
def test_a_router_that_ends_is_started_again_with_the_requests_it_had(stubs, checkpoint):
    requests = ask(6)
    for stub in stubs:
        stub.delay_s = 1.5

    async def test(engine):
        task = asyncio.create_task(engine.generate(requests))
        while not sum(stub.calls["/generate"] for stub in stubs):
            await asyncio.sleep(0.02)
        os.kill(engine._router.process.pid, signal.SIGKILL)
        completions = await task
        assert engine._router.restarts == 1
        pid = engine._router.process.pid
        await engine.close()
        assert not Path(f"/proc/{pid}").exists()
        return completions

    assert whole(requests, run(test, "real", None, [stub.url for stub in stubs], checkpoint))


@pytest.mark.skipif(not REAL, reason="no router")
def test_a_thousand_requests_at_once_lose_none_and_memory_stays(stub_processes, checkpoint):
    """Engines at the speed of stand-ins, 50 ms a request, in processes of their own."""
    urls = stub_processes("0.05", "0.05", program="fast_stub.py")
    requests = ask(1000, length=16)

    async def test(engine):
        used = []
        for _ in range(3):
            assert whole(requests, await engine.generate(requests))
            used.append(resident())
        return used

    used = run(test, "real", None, urls, checkpoint, call_timeout_s=60.0)
    # The first round fills pools of connections and of memory.
    assert used[-1] - used[0] < 16 * 2**20


def test_a_router_that_is_not_there_is_named(stubs, checkpoint):
    options = {"start_timeout_s": 1.0}
    with pytest.raises(EngineError, match=r"the router http://127\.0\.0\.1:9 has not the servers"):
        run(
            lambda engine: engine.generate(ask(1)),
            "stand-in",
            lambda urls: "http://127.0.0.1:9",
            [stub.url for stub in stubs],
            checkpoint,
            **options,
        )


def test_what_is_no_router_is_refused(checkpoint):
    with pytest.raises(ValueError, match="router is 'nginx'; give \"start\""):
        create(model=checkpoint, router="nginx")


def test_without_sglang_router_it_says_what_to_install(checkpoint, monkeypatch):
    monkeypatch.setattr("relax_rollout.engines.sglang.launch.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"sglang-router 0\.3\.2 is to be started and is not installed"):
        create(model=checkpoint, urls=["http://127.0.0.1:9"], router="start")
