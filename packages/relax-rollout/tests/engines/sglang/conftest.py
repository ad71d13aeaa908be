"""Servers that stand in for SGLang's; see stub_server.py."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from relax_rollout.engines.sglang import create
from safetensors.torch import save_file

FILE = Path(__file__).with_name("stub_server.py")


def load_stub(name="stub_server"):
    spec = importlib.util.spec_from_file_location(f"relax_rollout_{name}", FILE.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stub_server = load_stub()
stub_router = load_stub("stub_router")


@pytest.fixture
def stubs():
    found = [stub_server.Stub(), stub_server.Stub()]
    yield found
    for stub in found:
        stub.close()


@pytest.fixture
def make_router():
    """Starts a stand-in of sglang-router in front of servers; gives its address."""
    started = []

    def start(urls):
        started.append(stub_router.StubRouter(urls))
        return started[-1].url

    yield start
    for router in started:
        router.close()


@pytest.fixture
def stub_processes():
    """Starts stubs in processes of their own: collectives hold Python's lock. Gives their addresses."""
    started = []

    def start(*faults, program=FILE.name):
        for one in faults:
            argument = one if isinstance(one, str) else json.dumps(one)
            command = [sys.executable, str(FILE.with_name(program)), argument]
            pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, **pipe))
        return [process.stdout.readline().strip() for process in started]

    yield start
    for process in started:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file(
        {name: torch.zeros(shape) for name, shape in stub_server.SHAPES.items()},
        tmp_path / "model.safetensors",
    )
    return tmp_path


@pytest.fixture
def run(checkpoint):
    """Runs a coroutine function of an engine over these servers."""

    def go(test, stubs, **options):
        given = {"call_timeout_s": 20.0, "retries": 2, "start_timeout_s": 5, "folder": checkpoint}

        async def body():
            urls = [stub if isinstance(stub, str) else stub.url for stub in stubs]
            engine = create(model=checkpoint, urls=urls, **(given | options))
            try:
                return await asyncio.wait_for(test(engine), 60)
            finally:
                await engine.close()

        return asyncio.run(body())

    return go


@pytest.fixture
def update():
    """Gives an engine weights, one bucket a tensor; its digests."""

    async def go(engine, weights, version=1):
        await engine.begin_update(version)
        for name, tensor in weights.items():
            await engine.load({name: tensor})
        return await engine.end_update()

    return go
