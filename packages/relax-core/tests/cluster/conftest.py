"""Runs of a small checkpoint on a Ray of their own, beside the same run in one process."""

import os
import signal
import threading

import pytest
import torch
from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.environment import set_environment
from relax_core.loop.rl import RlLoop
from relax_core.testing.runs import records, start, weights

# Ray reads some of it when it is imported, which some tests here do before a run does.
set_environment(ClusterConfig(mode="ray"))


@pytest.fixture
def finish(tmp_path):
    """Runs a config to its end; gives its metrics without times, and its weights."""

    def go(config, name):
        return results(start(config, tmp_path / name))

    return go


@pytest.fixture
def read_results():
    """Metrics without times, and weights, of a run directory."""
    return results


def results(directory):
    return records(directory), weights(directory.hf)


@pytest.fixture
def same_results():
    """Whether two runs gave the same bits."""

    def compare(one, other):
        assert one[0] == other[0]
        assert one[1].keys() == other[1].keys()
        assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])

    return compare


@pytest.fixture
def killing(monkeypatch):
    """Kills processes of a role during steps: `killing({2: ("engine", 0), 3: ("rank", 1)})`.

    "stopped rank" stops one, as if it hung. A third entry waits so many seconds first, so that the process
    dies in the middle of something.
    """
    killed = []

    def plan(steps):
        before = RlLoop.step

        def step(loop, number):
            if number in steps:
                role, which, *wait = steps.pop(number)
                if role != "engine":
                    pid = loop._session.policy.pids[which]
                else:
                    pid = loop._rollout.runner.run(loop._rollout.engine.pids())[which]
                killed.append(pid)
                how = signal.SIGSTOP if role == "stopped rank" else signal.SIGKILL
                timer = threading.Timer(wait[0] if wait else 0, os.kill, (pid, how))
                timer.start()
                timer.join() if not wait else None
            return before(loop, number)

        monkeypatch.setattr(RlLoop, "step", step)
        return killed

    return plan
