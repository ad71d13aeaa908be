"""Commands that are ended with ours, by real signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from relax_npu import child

# As docker's client: on a signal it says goodbye, and only then ends.
CLIENT = """
import signal, sys
def end(number, frame):
    print("ended by", signal.Signals(number).name, flush=True)
    sys.exit(3)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
print("ready", flush=True)
while True:
    signal.pause()
"""
OURS = """
import sys
from relax_npu.child import run
sys.exit(run([sys.executable, "-c", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("number", "group", "code"),
    [(signal.SIGTERM, False, 3), (signal.SIGINT, True, child.INTERRUPTED)],
    ids=["kill", "ctrl-c"],
)
def test_a_command_is_ended_with_ours_and_waited_for(number: int, group: bool, code: int) -> None:
    source = str(Path(child.__file__).parents[1])
    ours = subprocess.Popen(
        [sys.executable, "-c", OURS, CLIENT],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
        start_new_session=True,
    )
    assert ours.stdout is not None
    assert ours.stdout.readline() == "ready\n"
    # A terminal sends Ctrl-C to the whole group.
    (os.killpg if group else os.kill)(ours.pid, number)
    told, _ = ours.communicate(timeout=120)
    assert told == f"ended by {signal.Signals(number).name}\n"
    assert ours.returncode == code


def test_the_exit_code_is_the_commands() -> None:
    assert child.run([sys.executable, "-c", "raise SystemExit(7)"]) == 7
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert child.run([sys.executable, "-c", killed]) == 128 + signal.SIGKILL
