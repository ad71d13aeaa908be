"""A server's process: its own group, ended as a whole; a free port; the folder that SGLang reads."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from relax_rollout import create_engine
from relax_rollout.engines.sglang.launch import require_processor
from relax_rollout.engines.sglang.process import Process, free_port, python
from relax_rollout.engines.sglang.view import MARGIN, max_context, write_view

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
sys.stdout.write(f"{os.getpid()} {child}\\n") if child else None
sys.stdout.flush()
time.sleep(100)
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with Path(f"/proc/{pid}/stat").open() as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_process_ends_with_its_children_though_they_do_not_want_to(tmp_path):
    log = tmp_path / "log"
    process = Process(python("-c", STUBBORN), {}, log)
    while not log.read_text():
        time.sleep(0.05)
    pids = [int(word) for word in log.read_text().split()]
    assert pids[0] == process.pid
    assert all(alive(pid) for pid in pids)
    process.end(grace_s=0.3)
    assert process.code is not None
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


PARENT = """
import os, subprocess, sys
os.environ["RELAX_SGLANG_PARENT"] = str(os.getpid())
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
child.wait()
"""
CHILD = """
import os, time
from relax_rollout.engines.sglang.parent import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(1000)
"""


def test_a_server_ends_with_a_run_that_is_killed():
    """As its first lines see to, in `serve` and `route`."""
    run = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    pid = int(run.stdout.readline())
    assert alive(pid)
    run.kill()
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.05)


def test_the_end_of_the_log_is_told(tmp_path):
    process = Process([sys.executable, "-c", "print('\\n'.join(map(str, range(40))))"], {}, tmp_path / "log")
    process._child.wait()
    assert process.tail().splitlines() == [str(n) for n in range(25, 40)]


def test_ports_are_none_that_an_outgoing_connection_may_take():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(20000 <= free_port() < max(first, 32768) for _ in range(50))


TEXT = {"model_type": "qwen3_5_text", "dtype": "float32", "max_position_embeddings": 100, "eos_token_id": 2}
KINDS = ["linear_attention"] * 3 + ["full_attention"]


def write(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_text_only_checkpoint_gets_the_layout_that_sglang_knows(tmp_path):
    model = write(tmp_path / "model", TEXT | {"layer_types": KINDS * 2})
    (tmp_path / "view").mkdir()
    view = write_view(model, tmp_path / "view")
    config = json.loads((view / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert config["text_config"]["full_attention_interval"] == 4
    assert config["text_config"]["max_position_embeddings"] == 100 + MARGIN
    assert (view / "model.safetensors").read_bytes() == b"weights"
    assert max_context(model) == 100


def test_a_checkpoint_in_that_layout_keeps_it(tmp_path):
    given = {
        "model_type": "qwen3_5",
        "vision_config": {"depth": 3},
        "text_config": TEXT | {"layer_types": KINDS},
    }
    model = write(tmp_path / "model", given)
    (tmp_path / "view").mkdir()
    config = json.loads((write_view(model, tmp_path / "view") / "config.json").read_text())
    assert config["vision_config"] == {"depth": 3}
    assert config["text_config"]["full_attention_interval"] == 4
    assert config["text_config"]["max_position_embeddings"] == 100 + MARGIN


@pytest.mark.parametrize(
    ("stated", "share"),
    [
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, 0.5),
        ({"partial_rotary_factor": 0.75}, 0.75),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.75}, 0.5),
        ({"rope_parameters": {"rope_theta": 1e4}}, 0.25),
    ],
)
def test_the_rotated_share_of_a_head_stands_where_that_release_reads_it(tmp_path, stated, share):
    model = write(tmp_path / "model", TEXT | stated | {"layer_types": KINDS})
    (tmp_path / "view").mkdir()
    config = json.loads((write_view(model, tmp_path / "view") / "config.json").read_text())
    assert config["text_config"]["partial_rotary_factor"] == share


def test_a_vision_tower_without_its_processor_is_refused_before_a_server_starts(tmp_path):
    tower = {"model_type": "qwen3_5", "vision_config": {"depth": 3}, "text_config": TEXT}
    model = write(tmp_path / "model", tower)
    with pytest.raises(ValueError, match=r"neither preprocessor_config\.json nor processor_config\.json"):
        create_engine("sglang", model=model, device="cpu")
    (model / "preprocessor_config.json").write_text("{}")
    require_processor(model)
    require_processor(write(tmp_path / "text", TEXT))


def test_another_model_is_served_as_it_is(tmp_path):
    model = write(tmp_path / "model", {"model_type": "llama"})
    assert write_view(model, tmp_path) == model


def test_layers_without_a_rhythm_are_refused(tmp_path):
    model = write(tmp_path / "model", TEXT | {"layer_types": [*KINDS, "full_attention"]})
    with pytest.raises(ValueError, match=r"full attention at \[3, 4\]"):
        write_view(model, tmp_path)
