"""Roles are killed, or made to hang, at random moments of a run."""

import json
import os
import random
import signal
import threading

import pytest
from relax_core.loop.rl import RlLoop


@pytest.fixture
def chaos(monkeypatch):
    """`chaos(seed, roles)`: at the start of each step, or some time into it, one of the roles comes to harm.

    Gives what was done, and the handlers of SIGTERM that the steps saw.
    """
    done, handlers = [], []

    def plan(seed, roles):
        rng = random.Random(seed)
        before = RlLoop.step

        def harm(role, pid):
            try:
                os.kill(pid, signal.SIGSTOP if role == "hang" else signal.SIGKILL)
            except ProcessLookupError:
                return
            done.append(role)

        def step(loop, number):
            handlers.append(signal.getsignal(signal.SIGTERM))
            role = rng.choice(roles)
            pids = (
                loop._session.policy.pids
                if role == "rank"
                else loop._rollout.runner.run(loop._rollout.engine.pids())
            )
            if pids and number > 1:
                threading.Timer(rng.choice([0.0, rng.random() * 2]), harm, (role, rng.choice(pids))).start()
            return before(loop, number)

        monkeypatch.setattr(RlLoop, "step", step)
        return done, handlers

    return plan


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("seed", "roles"),
    [
        (0, ("engine", "rank")),
        pytest.param(1, ("engine", "rank"), marks=SLOW),
        pytest.param(2, ("engine", "rank", "hang"), marks=SLOW),
    ],
)
def test_colocated_roles_end_with_the_bits_of_one_process(
    small_run, finish, same_results, chaos, seed, roles
):
    expected = finish(small_run(), "inline")
    done, handlers = chaos(seed, roles)
    cluster = {"mode": "ray", "max_restarts": 20, "engine_timeout_s": 30.0}
    same_results(finish(small_run(cluster=cluster), "ray"), expected)
    assert done
    # Ray takes SIGTERM for itself; the run has to keep it, to end after its step.
    assert {getattr(handler, "__name__", "") for handler in handlers} == {"_on_signal"}


@pytest.mark.parametrize(
    ("placement", "seed"),
    [("async", 0), pytest.param("async", 1, marks=SLOW), pytest.param("hybrid", 2, marks=SLOW)],
)
def test_no_prompt_is_lost_and_none_counted_twice(small_run, finish, chaos, tmp_path, placement, seed):
    from relax_core.data import load_prompts, load_tokenizer

    config = small_run(
        run={"steps": 5},
        cluster={
            "mode": "ray", "placement": placement, "engines": 2, "max_staleness": 2, "max_restarts": 20
        },
        trainer={"lr": 1e-4},
        rollout={"max_new_tokens": 24},
        eval={"before": False, "after": False},
    )  # fmt: skip
    done, _ = chaos(seed, ("engine", "rank"))
    steps, _ = finish(config, placement)
    assert done
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    samples = [json.loads(line) for line in (tmp_path / placement / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 5 * 16
    data = load_prompts(config.data, load_tokenizer(config.model.path), seed=config.run.seed)
    trained = [
        sample["prompt"] for step in range(1, 6) for sample in [s for s in samples if s["step"] == step][:4]
    ]
    assert trained == [prompt.prompt_text for prompt in data.stream().take(20)]
    tokens = [sum(s["tokens"] for s in samples if s["step"] == step) for step in range(1, 6)]
    assert [step["rollout_tokens"] for step in steps] == tokens
