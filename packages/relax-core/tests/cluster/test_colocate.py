"""The same loop with its roles on Ray: equal bits, whoever dies on the way."""

import json
import logging

import psutil
import pytest
import torch

RAY = {"mode": "ray"}
TWO = {"run": {"steps": 2}}


@pytest.fixture
def inline(small_run, finish):
    return finish(small_run(), "inline")


def test_one_rank_and_one_engine_give_the_bits_of_one_process_though_both_are_killed(
    small_run, finish, inline, same_results, killing, caplog
):
    caplog.set_level(logging.INFO, "relax_core.cluster")
    killed = killing({2: ("engine", 0), 4: ("rank", 0)})
    same_results(finish(small_run(cluster=RAY), "ray"), inline)
    assert len(killed) == 2
    assert not any(psutil.pid_exists(pid) for pid in killed)
    said = [record.message for record in caplog.records if record.name.startswith("relax_core.cluster")]
    assert any("engine 0 died" in line for line in said)
    assert "weights travel by ipc: every engine opens the memory of ranks on its devices" in said
    # The checkpoint of step 2 and the third mini-batch are where the new trainer comes from.
    assert any("starts again from step_2 and repeats 1 optimizer steps" in line for line in said)


def test_two_ranks_and_two_engines_train_the_same_model(small_run, finish, killing, tmp_path):
    one = finish(small_run(**TWO), "inline")
    killing({2: ("engine", 1, 0.02)})
    traced = {"run": {**TWO["run"], "trace": True}}
    two = finish(small_run(**traced, cluster={**RAY, "trainer_ranks": 2, "engines": 2}), "ray")
    close(one, two)
    timeline_has_every_process(tmp_path / "ray" / "trace.json")


def test_two_ranks_that_hang_within_a_collective_start_anew(small_run, finish, killing, caplog):
    """One is stopped; the other waits for it in the middle of a step."""
    one = finish(small_run(**TWO), "inline")
    killed = killing({2: ("stopped rank", 1)})
    # On a busy machine a step that takes longer is taken for hanging, too.
    cluster = {**RAY, "trainer_ranks": 2, "rank_timeout_s": 25.0, "max_restarts": 20}
    two = finish(small_run(**TWO, cluster=cluster), "ray")
    assert "rank 0, 1 did not answer 'step' within 25 seconds, cluster.rank_timeout_s is 25" in caplog.text
    assert not any(psutil.pid_exists(pid) for pid in killed)
    close(one, two)


def close(one, two):
    """Sums are rounded in another order: metrics to 1e-4, weights to what Adam makes of round-off."""
    assert [record["step"] for record in two[0]] == [0, 1, 2]
    for mine, theirs in zip(one[0], two[0], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)
    for name, tensor in one[1].items():
        torch.testing.assert_close(two[1][name], tensor, rtol=0, atol=1e-3, msg=name)


def timeline_has_every_process(file):
    events = json.loads(file.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"rank 0", "rank 1"} < {*names.values()}
    by_process = {
        name: [e for e in spans if e["pid"] == pid and e["name"] in ("train policy", "judge")]
        for pid, name in names.items()
    }
    phases = [e for e in spans if e["pid"] == 1 and e["name"] == "train"]
    for rank in ("rank 0", "rank 1"):
        assert len(by_process[rank]) == len(phases) == 2
        for phase, step in zip(phases, by_process[rank], strict=True):
            # Processes of one machine share a clock, which is found out.
            assert phase["ts"] <= step["ts"] <= step["ts"] + step["dur"] <= phase["ts"] + phase["dur"]
    sampling = [e for e in spans if e["pid"] == 1 and e["name"] in ("rollout", "eval")]
    for engine in ("engine 0", "engine 1"):
        (pid,) = (pid for pid, name in names.items() if name == engine)
        own = [e for e in spans if e["pid"] == pid]
        # Engine 1 was killed, and its spans of that step with it.
        assert {"generate", "begin", "load", "end", "release", "reclaim"} <= {e["name"] for e in own}
        for sampled in (e for e in own if e["name"] == "generate"):
            assert sampled["args"]["tokens"] >= sampled["args"]["requests"] > 0
            middle = sampled["ts"] + sampled["dur"] / 2
            assert any(phase["ts"] <= middle <= phase["ts"] + phase["dur"] for phase in sampling)
    workers = [spans for name, spans in by_process.items() if name.startswith("reward worker ")]
    # A call that is late on a slow machine has no times.
    scored = sum(e["args"]["completions"] for e in spans if e["name"] == "score")
    assert 0 < sum(map(len, workers)) <= scored
