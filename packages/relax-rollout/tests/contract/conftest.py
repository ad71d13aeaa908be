"""The engines of the contract suite: each test here runs on all of them, through the protocol alone."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from relax_rollout import Completion, Request, RolloutEngine, SamplingParams, create_engine

ENGINES = ("transformers",)


class Harness:
    """Starts one kind of engine, runs a coroutine with it and closes it."""

    def __init__(self, name: str, model: Path, other: Path) -> None:
        self.name = name
        self.model = model
        self.other = other

    def run(self, test: Callable[[RolloutEngine], Awaitable[Any]], model: Path | None = None) -> Any:
        async def body() -> Any:
            engine = create_engine(self.name, model=model or self.model)
            try:
                return await asyncio.wait_for(test(engine), 60)
            finally:
                await engine.close()

        return asyncio.run(body())

    def generate(self, requests: list[Request], model: Path | None = None) -> list[Completion]:
        return self.run(lambda engine: engine.generate(requests), model)


@pytest.fixture(params=ENGINES)
def harness(request, models) -> Harness:
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
