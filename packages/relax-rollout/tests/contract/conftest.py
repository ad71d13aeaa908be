"""The engines of the contract suite: each test here runs on all of them, through the protocol alone."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from relax_rollout import Completion, Request, RolloutEngine, SamplingParams, create_engine
from safetensors.torch import load_file

ENGINES = ("transformers", "sglang") if os.environ.get("RELAX_TEST_SGLANG") == "1" else ("transformers",)
DEVICE = os.environ.get("RELAX_TEST_DEVICE", "cpu")
TIME_LIMIT_S = {"transformers": 60, "sglang": 400}


class Harness:
    """Starts one kind of engine, runs a coroutine with it and closes it."""

    tolerance = 1e-5
    """Largest difference of log-probs in float32; logits of these models are a few units."""
    served = ("cpu", "float32")
    """Device and dtype."""

    def __init__(self, name: str, model: Path, other: Path) -> None:
        self.name = name
        self.model = model
        self.other = other

    async def start(self, model: Path) -> RolloutEngine:
        return create_engine(self.name, model=model)

    def run(self, test: Callable[[RolloutEngine], Awaitable[Any]], model: Path | None = None) -> Any:
        async def body() -> Any:
            engine = await self.start(model or self.model)
            try:
                return await asyncio.wait_for(test(engine), TIME_LIMIT_S[self.name])
            finally:
                await engine.close()

        return asyncio.run(body())

    def generate(self, requests: list[Request], model: Path | None = None) -> list[Completion]:
        return self.run(lambda engine: engine.generate(requests), model)


class SglangHarness(Harness):
    """Joins a server that stays for the session, and brings it back to the model's weights first."""

    if DEVICE != "cpu":
        # The 8 bits of bfloat16 over logits of a few units.
        tolerance = 5e-2
        served = (DEVICE, "bfloat16")

    def __init__(self, model: Path, other: Path, servers: Any) -> None:
        super().__init__("sglang", model, other)
        self._servers = servers

    async def start(self, model: Path) -> RolloutEngine:
        # Models of equal shapes share a server.
        served = self.model if model == self.other else model
        engine = create_engine("sglang", model=served, urls=[self._servers.url(served)], start_timeout_s=300)
        await engine.resume()
        await engine.begin_update(0)
        await engine.load(load_file(model / "model.safetensors"))
        await engine.end_update()
        return engine


@pytest.fixture(params=ENGINES)
def harness(request, models) -> Harness:
    if request.param == "sglang":
        return SglangHarness(models.get(), models.get(seed=1), request.getfixturevalue("sglang_servers"))
    return Harness(request.param, models.get(), models.get(seed=1))


@pytest.fixture
def ask() -> Callable[..., Request]:
    """Builds a request; sampling settings by keyword."""

    def build(id: str = "r", prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> Request:
        return Request(id, prompt, SamplingParams(**({"max_new_tokens": 8, "seed": 0} | sampling)))

    return build


@pytest.fixture
def mixed(ask) -> list[Request]:
    """Groups of three over prompts of length 1 to 70, so that every batch is padded."""
    lengths = (1, 2, 3, 5, 17, 70)
    return [
        ask(f"{n}.{k}", tuple((7 * n + i) % 40 for i in range(n)), seed=100 * n + k)
        for n in lengths
        for k in range(3)
    ]


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """Waits until the engine's health satisfies a condition."""

    async def wait(engine: RolloutEngine, condition: Callable[[Any], bool]) -> None:
        while not condition(await engine.health()):
            await asyncio.sleep(0.002)

    return wait
