"""The runner: user functions, limits, and failures that never raise."""

import asyncio
import logging
import os
import threading
import time

import pytest
from relax_rollout.rewards import Reward, RewardInput, RewardRunner, load_reward


def test_exact_match_ignores_white_space_at_the_ends_only(runner_of, items):
    results = runner_of("exact_match").score_now(items(" yes\n", "Yes", "y es", "yes", answer="yes "))
    assert [result.correct for result in results] == [True, False, False, True]
    assert [result.score for result in results] == [1.0, 0.0, 0.0, 1.0]
    assert "the data row has none" in runner_of("exact_match").score_now(items("x"))[0].error


def test_a_function_may_return_a_number_a_bool_or_a_result(runner_of, items):
    results = runner_of("my_rewards:length").score_now(items("a", "", "abc"))
    assert [result.score for result in results] == [1.0, 0.0, 3.0]
    (yes,) = runner_of("my_rewards:right").score_now(items("x", answer="x"))
    assert (yes.score, yes.correct) == (1.0, True)
    (full,) = runner_of("my_rewards:full").score_now(items("x"))
    assert (full.score, full.correct, full.extracted) == (0.25, True, "x")
    assert full.elapsed_s < 90
    assert runner_of("my_rewards:numpy_score").score_now(items("x"))[0].score == 0.5


def test_a_function_sees_messages_and_metadata(runner_of):
    item = RewardInput([{"role": "user", "content": "hi"}], "x", metadata={"bonus": 0.75, "shape": (1, 2)})
    assert runner_of("my_rewards:metadata").score_now([item])[0].score == 0.75
    assert runner_of("my_rewards:prompt").score_now([item])[0].score == 1.0


FAILURES = {
    "raises": "KeyError: 'no such column'",
    "exits": "SystemExit: 3",
    "dies": "the reward worker ended by itself",
    "text": "TypeError: the reward returned str; it must return a number or a RewardResult",
    "nothing": "TypeError: the reward returned NoneType",
    "nan": "ValueError: the reward's score is nan; it must be a finite number",
    "infinite": "ValueError: the reward's score is inf",
    "huge": "ValueError: the reward's score is 1e+300; it must be a finite number from -1e+30 to 1e+30",
    "own_error": "judge was unsure",
    "raises_async": "ValueError: async",
    "own_timeout": "TimeoutError: the judge's server did not answer",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_reward_is_a_result(runner_of, items, caplog, name):
    runner = runner_of(f"my_rewards:{name}", fallback_score=-0.5)
    with caplog.at_level(logging.WARNING):
        results = runner.score_now(items("x", "y", "z"))
    assert [result.score for result in results] == [-0.5] * 3
    assert all(FAILURES[name] in result.error for result in results)
    assert all(result.correct is None for result in results)
    assert len(caplog.records) == 1
    assert "failed on 3 of 3 completions, which score -0.5" in caplog.text


@pytest.mark.parametrize("name", ["loops", "blocks", "stuck", "stubborn"])
def test_an_endless_loop_is_ended_and_the_others_are_judged(runner_of, items, name):
    runner = runner_of(f"my_rewards:{name}", 1.0, 2)
    started = time.monotonic()
    results = runner.score_now(items("loop"))
    assert time.monotonic() - started < 15
    assert results[0].error == "over its time limit of 1 s"
    assert results[0].elapsed_s == 1.0
    assert [result.score for result in runner.score_now(items("a", "b", "c"))] == [1.0] * 3


def test_a_late_call_that_can_be_interrupted_keeps_its_process(runner_of, items):
    runner = runner_of("my_rewards:loops", 0.5, 1)
    pids = []
    for text in ("a", "loop", "b"):
        runner.score_now(items(text))
        pids.append(runner.worker_pids)
    assert pids[0] == pids[1] == pids[2]


def test_processes_that_overran_are_gone(runner_of, items):
    runner = runner_of("my_rewards:stuck", 0.5, 1)
    pids = []

    async def watch():
        task = asyncio.create_task(runner.score(items("loop")))
        while not task.done():
            pids.extend(runner.worker_pids)
            await asyncio.sleep(0.01)
        return await task

    assert "time limit" in asyncio.run(watch())[0].error
    assert len(set(pids)) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_coroutine_over_its_limit_does_not_cost_the_others(runner_of, items):
    runner = runner_of("my_rewards:waits", 1.0, 64)
    results = runner.score_now(items("60", *["0.3"] * 40))
    assert results[0].error == "over its time limit of 1 s"
    assert all(result.score == 1.0 and result.elapsed_s < 1 for result in results[1:])
    assert len(runner.worker_pids) == 1


def test_a_coroutine_that_blocks_takes_its_companions_down_with_a_reason(runner_of, items):
    runner = runner_of("my_rewards:blocks", 1.0, 2)
    results = runner.score_now(items("wait", "loop"))
    assert all(r.score == 0.0 for r in results)
    assert all("time limit" in r.error or "another call kept its process" in r.error for r in results)


def test_concurrency_is_bounded_and_used(runner_of, items):
    runner = runner_of("my_rewards:pid", 10.0, 3)
    pids = {result.score for result in runner.score_now(items(*"abcdefghij"))}
    assert 1 <= len(pids) <= 3
    assert len(runner.worker_pids) <= 3
    slow = runner_of("my_rewards:waits", 10.0, 2)
    slow.score_now(items("0"))
    started = time.monotonic()
    slow.score_now(items(*["0.2"] * 6))
    assert 0.6 <= time.monotonic() - started < 5


def test_time_in_the_queue_and_at_start_up_does_not_count(runner_of, items):
    runner = runner_of("my_rewards:sleeps", 0.6, 1)
    results = runner.score_now(items(*["0.25"] * 6))
    assert [result.error for result in results] == [None] * 6


def test_the_event_loop_goes_on_while_functions_run(runner_of, items):
    runner = runner_of("my_rewards:sleeps", 10.0, 1)

    async def body():
        task = asyncio.create_task(runner.score(items("0.3")))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(body()) > 10
    assert asyncio.run(runner.score(items("0")))[0].score == 1.0


def test_what_a_function_prints_goes_to_standard_error(runner_of, items, capfd):
    assert [r.score for r in runner_of("my_rewards:prints").score_now(items("a", "b"))] == [1.0, 1.0]
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("{}") == 4


def test_long_texts_go_both_ways(runner_of, items):
    (result,) = runner_of("my_rewards:long_text").score_now(items("y" * 1_000_000))
    assert len(result.extracted) == 2000


def test_what_cannot_be_sent_is_an_error_of_that_item_alone(runner_of):
    bad = RewardInput("q", "x", metadata={"bonus": lambda: 0})
    good = RewardInput("q", "x", metadata={"bonus": 2.0})
    first, second = runner_of("my_rewards:metadata", 10.0, 1).score_now([bad, good])
    assert "the input cannot be sent" in first.error
    assert second.score == 2.0


def test_memory_beyond_the_limit_fails_the_call(runner_of, items):
    reward = load_reward("my_rewards:hungry")
    limited = Reward(reward.name, reward.quick, reward.worker, memory_gib=2.0)
    with RewardRunner(limited) as runner:
        small, large = runner.score_now(items("1000", str(3 * 2**30)))
    assert small.score == 1000.0
    assert "MemoryError" in large.error


def test_order_is_kept(runner_of, items):
    runner = runner_of("my_rewards:waits", 10.0, 8)
    results = runner.score_now(items("0.2", "0", "0.1", "bad"))
    assert [result.error is None for result in results] == [True, True, True, False]


def test_a_closed_runner_has_no_processes_and_starts_anew(runner_of, items):
    runner = runner_of("my_rewards:length")
    runner.score_now(items("abc"))
    (pid,) = runner.worker_pids
    runner.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the worker is still there")
    assert runner.score_now(items("abc"))[0].score == 3.0


def test_closing_fails_what_is_in_progress(runner_of, items):
    runner = runner_of("my_rewards:sleeps", 60.0, 1)

    async def body():
        task = asyncio.create_task(runner.score(items("50", "50")))
        await asyncio.sleep(0.5)
        runner.close()
        return await task

    assert all("closed" in result.error for result in asyncio.run(body()))


def test_giving_up_on_what_is_in_progress_is_quiet(runner_of, items, monkeypatch):
    runner = runner_of("my_rewards:sleeps", 60.0, 1)
    lost = []
    monkeypatch.setattr("threading.excepthook", lost.append)

    async def body():
        task = asyncio.create_task(runner.score(items("50", "50")))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(body())
    runner.close()
    deadline = time.monotonic() + 5
    while any(t.name == "relax-rollout-reward" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lost == []


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((0.0,), "timeout_s is 0.0"),
        ((float("nan"),), "timeout_s is nan"),
        ((1.0, 0), "concurrency is 0"),
        ((1.0, 2.5), "concurrency is 2.5"),
    ],
)
def test_limits_out_of_range_are_refused(limits, words):
    with pytest.raises(ValueError, match=words):
        RewardRunner(load_reward("math"), *limits)
    with pytest.raises(ValueError, match="fallback_score is inf"):
        RewardRunner(load_reward("math"), fallback_score=float("inf"))
