"""A runner of each reward, closed after the test; and a module with rewards of every kind."""

import textwrap
from collections.abc import Callable, Iterator

import pytest
from relax_rollout.rewards import RewardInput, RewardRunner, load_reward

MY_REWARDS = """
import asyncio, hashlib, os, sys, time
import numpy as np
from relax_rollout.rewards import RewardResult

def length(item): return len(item.completion)
def full(item): return RewardResult(0.25, correct=True, extracted="x", elapsed_s=99.0)
def metadata(item): return item.metadata["bonus"]
def prompt(item): return len(item.prompt)
def right(item): return item.completion == item.answer
def numpy_score(item): return np.float32(0.5)
def raises(item): raise KeyError("no such column")
def exits(item): sys.exit(3)
def dies(item): os._exit(3)
def text(item): return "good"
def nothing(item): pass
def nan(item): return float("nan")
def infinite(item): return RewardResult(float("inf"))
def huge(item): return 1e300
def own_error(item): return RewardResult(1.0, error="judge was unsure")
def loops(item):
    while item.completion == "loop": pass
    return 1.0
def stuck(item):
    if item.completion == "loop": hashlib.pbkdf2_hmac("sha256", b"x", b"x", 2**31 - 1)
    return 1.0
def stubborn(item):
    while item.completion == "loop":
        try: time.sleep(60)
        except BaseException: pass
    return 1.0
def sleeps(item): time.sleep(float(item.completion)); return 1.0
def prints(item): print("{}", flush=True); os.write(1, b"{}"); return 1.0
def pid(item): return float(os.getpid())
def hungry(item): return float(len(bytearray(int(item.completion))))
def long_text(item): return RewardResult(1.0, extracted="x" * 1_000_000)
async def waits(item): await asyncio.sleep(float(item.completion)); return 1.0
async def raises_async(item): raise ValueError("async")
async def own_timeout(item): raise TimeoutError("the judge's server did not answer")
async def blocks(item):
    while item.completion == "loop": pass
    await asyncio.sleep(60 if item.completion == "wait" else 0)
    return 1.0
class Judge:
    async def __call__(self, item): return 3.0
judge = Judge()
number = 5
"""


@pytest.fixture
def runner_of(tmp_path, monkeypatch) -> Iterator[Callable[..., RewardRunner]]:
    (tmp_path / "my_rewards.py").write_text(textwrap.dedent(MY_REWARDS))
    monkeypatch.syspath_prepend(tmp_path)
    runners = []

    def build(spec: str, *limits: float, **more: float) -> RewardRunner:
        runners.append(RewardRunner(load_reward(spec), *limits, **more))
        return runners[-1]

    yield build
    for runner in runners:
        runner.close()


@pytest.fixture
def items() -> Callable[..., list[RewardInput]]:
    def build(*completions: str, answer: str | None = None) -> list[RewardInput]:
        return [RewardInput("a prompt", completion, answer) for completion in completions]

    return build
