"""Rewards as Ray tasks; `judge` itself runs here, without a cluster."""

import os
import socket
import time

import pytest
from relax_core.cluster.reward_tasks import judge
from relax_rollout.rewards import RewardInput

ITEM = RewardInput("1 + 1", "2", "2")


@pytest.fixture
def reward(tmp_path, monkeypatch):
    (tmp_path / "task_reward.py").write_text(
        "import asyncio, time\n"
        "def right(item): return item.completion == item.answer\n"
        "def slow(item):\n"
        "    try: time.sleep(60)\n"
        "    except Exception: pass\n"
        "def wrong(item): raise KeyError('nothing')\n"
        "def large(item): return len(bytearray(2**31))\n"
        "async def later(item):\n"
        "    await asyncio.sleep(0)\n"
        "    return 0.5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, **limits: judge(
        f"task_reward:{name}", ITEM, limits.get("timeout_s", 5.0), limits.get("memory_gib")
    )


def test_a_reward_is_judged_and_coroutines_too(reward):
    began = time.time()
    answer = reward("right")
    assert answer.pop("elapsed_s") >= 0
    assert began <= answer.pop("ended_at") <= time.time()
    assert answer == {
        "score": 1.0, "correct": True, "extracted": None, "error": None,
        "worker": f"{socket.gethostname()}:{os.getpid()}",
    }  # fmt: skip
    assert reward("later")["score"] == 0.5


def test_a_call_over_its_time_is_interrupted(reward):
    started = time.perf_counter()
    assert reward("slow", timeout_s=0.2) == {"late": True}
    assert time.perf_counter() - started < 10
    # The clock is off again.
    assert reward("right")["score"] == 1.0


def test_what_a_call_raises_is_told_and_so_is_a_reward_that_is_not_there(reward):
    assert reward("wrong")["failed"] == "KeyError: 'nothing'"
    assert "missing" in reward("missing")["failed"]


def test_memory_beyond_the_limit_fails_the_call_alone(reward):
    assert reward("large", memory_gib=0.5)["failed"].startswith("MemoryError")
    assert reward("large")["score"] == 2**31


def test_a_tool_is_called_as_rewards_are():
    call = RewardInput(
        "", "relax_core.loop.environments.calculator:calculator", metadata={"expression": "6*7"}
    )
    told = judge("relax_core.loop.environments.worker:call_tool", call, 5.0, None)
    assert (told["extracted"], told["error"]) == ("42", None)
