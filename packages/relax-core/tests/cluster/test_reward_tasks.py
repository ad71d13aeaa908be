"""Rewards as Ray tasks: `judge` in this process, and the tasks themselves on a Ray that is full."""

import asyncio
import os
import socket
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from relax_core.cluster import reward_tasks
from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.plan import plan_placement
from relax_core.cluster.ray_process import open_ray
from relax_core.cluster.reward_tasks import TaskPool, free_seats, judge
from relax_core.cluster.seats import open_seats
from relax_rollout.rewards import RewardInput, RewardRunner, load_reward
from relax_rollout.rewards.runner import RewardLimits

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
        "def large(item): return len(bytearray(2**29))\n"
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
    assert reward("large", memory_gib=0.25)["failed"].startswith("MemoryError")
    assert reward("large", timeout_s=60.0)["score"] == 2**29


def test_a_tool_is_called_as_rewards_are():
    call = RewardInput(
        "", "relax_core.loop.environments.calculator:calculator", metadata={"expression": "6*7"}
    )
    told = judge("relax_core.loop.environments.worker:call_tool", call, 5.0, None)
    assert (told["extracted"], told["error"]) == ("42", None)


TASKS = """
import os, signal, time
from relax_rollout.rewards import RewardResult
def timed(item):
    began, meeting = time.time(), item.metadata["meeting"]
    open(os.path.join(meeting, item.completion), "w").close()
    while len(os.listdir(meeting)) < item.metadata["concurrency"]:
        time.sleep(0.01)
    time.sleep(0.1)
    return RewardResult(1.0, extracted=f"{began} {time.time()}")
def harm(item):
    if item.completion == "deaf":
        # As foreign code that gives Python no turn.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        with open(item.answer, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    if item.completion == "crash":
        os._exit(3)
    return 1.0
"""


@pytest.fixture(scope="module")
def full_ray(tmp_path_factory):
    """Seats of two tasks on a Ray that has not a CPU beyond those of the run."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "ray_tasks.py").write_text(TASKS)
    config = ClusterConfig(mode="ray")
    plan = plan_placement(config, "cpu", 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        cpus = sum(int(bundle["CPU"]) for bundle in plan.bundles)
        with open_ray(config, cpus=cpus, weight_bytes=1), open_seats(plan, timeout_s=300) as seats:
            yield seats


@pytest.fixture
def score(full_ray):
    """Scores completions by a function of `ray_tasks`, so many at a time."""

    def go(name, items, *, concurrency=2, timeout_s=60.0):
        pool = partial(TaskPool, free_seats(full_ray.tasks()))
        reward = load_reward(f"ray_tasks:{name}")

        async def body():
            with RewardRunner(reward, timeout_s, concurrency, start_pool=pool) as runner:
                return await runner.score(items)

        return asyncio.run(body())

    return go


def most_at_once(results):
    spans = [tuple(map(float, result.extracted.split())) for result in results]
    return max(sum(began <= moment < ended for began, ended in spans) for moment, _ in spans)


def test_what_waits_for_a_seat_behind_another_pool_has_not_begun(monkeypatch):
    """Its time would run, and it be late before it could start."""
    begun, seats = [], []

    class Task:
        def options(self, *, max_retries, **seat):
            seats.append(seat)
            return self

        def remote(self, function, item, *limits):
            begun.append((item.completion, asyncio.get_running_loop().create_future()))
            return begun[-1][1]

    monkeypatch.setattr(reward_tasks.ray, "remote", lambda function: Task())
    monkeypatch.setattr(reward_tasks, "START_LIMIT_S", 1e6)
    reward = SimpleNamespace(worker="module:function", memory_gib=None)

    async def body():
        free, told = free_seats([{"seat": 0}, {"seat": 1}]), []
        tools, rewards = (TaskPool(free, reward, RewardLimits(1.0, 4)) for _ in range(2))
        for pool, name in ((tools, "a"), (tools, "b"), (rewards, "c")):
            pool.submit(RewardInput("", name), told.append)
        for _ in range(20):
            await asyncio.sleep(0)
        assert [name for name, _ in begun] == ["a", "b"]
        begun[0][1].set_result({"score": 1})
        for _ in range(20):
            await asyncio.sleep(0)
        assert [name for name, _ in begun] == ["a", "b", "c"]
        assert seats == [{"seat": 0}, {"seat": 1}, {"seat": 0}]
        for _, answer in begun[1:]:
            answer.set_result({"score": 1})
        while len(told) < 3:
            await asyncio.sleep(0)

    asyncio.run(body())


@pytest.mark.parametrize("concurrency", [1, 2])
def test_tasks_run_on_a_full_ray_so_many_at_a_time(score, concurrency, tmp_path):
    """The first ones wait for one another."""
    told = {"meeting": str(tmp_path), "concurrency": concurrency}
    items = [RewardInput("", str(number), metadata=told) for number in range(5)]
    assert most_at_once(score("timed", items, concurrency=concurrency)) == concurrency


def test_a_task_whose_process_ends_fails_alone(score):
    crash, fine = score("harm", [RewardInput("", "crash"), RewardInput("", "fine")])
    assert crash.error is not None
    assert "died" in crash.error
    assert (fine.score, fine.error) == (1.0, None)


def test_a_task_that_cannot_be_interrupted_is_ended(score, tmp_path, monkeypatch):
    pid, start_s = tmp_path / "pid", 2.0
    # Where a process takes longer than that to start it is ended before it has begun.
    while not (pid.exists() and pid.read_text()):
        start_s *= 2
        monkeypatch.setattr(reward_tasks, "START_LIMIT_S", start_s)
        (deaf,) = score("harm", [RewardInput("", "deaf", str(pid))], timeout_s=0.5)
        assert deaf.error == "over its time limit of 0.5 s"
    deadline = time.monotonic() + 100
    while Path(f"/proc/{pid.read_text()}").exists():
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.05)
