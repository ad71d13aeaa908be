"""Finds out in a process of its own whether torch_npu works here, so that no broken install harms the caller.

A torch_npu without CANN makes `import torch` itself raise, a mismatch of builds can abort the process, a
driver in a bad state can hang it. Each of these ends the child, and is told as a state.
"""

import enum
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

MARKER = "RELAX_NPU_PROBE "
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_CHILD = Path(__file__).with_name("probe_child.py")


class ProbeState(enum.StrEnum):
    """How far torch_npu gets on this machine."""

    NO_TORCH = "no_torch"  # torch is not installed
    TORCH_BROKEN = "torch_broken"  # importing torch raises, with no backend loaded
    ABSENT = "absent"  # torch_npu is not installed
    BROKEN = "broken"  # importing torch_npu raises: CANN is missing or does not fit
    NO_DEVICE = "no_device"  # torch_npu works and sees no NPU
    DEVICE_BROKEN = "device_broken"  # an NPU is seen and cannot be taken
    CRASHED = "crashed"  # the process died on a signal
    HUNG = "hung"  # no answer in time
    READY = "ready"  # an NPU was taken and asked for its name and memory


@dataclass(frozen=True)
class Probe:
    """The result of `probe`.

    Attributes:
        state: how far it got.
        stage: what the child did last.
        error: the exception's type and text, or the signal; "" when nothing failed.
        torch, torch_npu, cann: versions, "" where unknown.
        count: visible NPUs.
        name: of NPU 0.
        total_memory: of NPU 0, in bytes.
        fla_npu: "loaded", "absent", or why it does not load; "" when it was not reached.
        missing: names of `operators` that no installed package registers.
        free_memory: of NPU 0, in bytes; -1 where it was not told.
        installed: versions of the distributions that go together or exclude one another, of those installed.
        mindspeed: names of MindSpeed's features that are on.
        mindspeed_error: why they could not be read; "" otherwise.
    """

    state: ProbeState
    stage: str = ""
    error: str = ""
    torch: str = ""
    torch_npu: str = ""
    cann: str = ""
    count: int = 0
    name: str = ""
    total_memory: int = 0
    fla_npu: str = ""
    missing: tuple[str, ...] = ()
    free_memory: int = -1
    installed: Mapping[str, str] = field(default_factory=dict)
    mindspeed: tuple[str, ...] = ()
    mindspeed_error: str = ""


def probe(
    *,
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    operators: Sequence[str] = (),
    mindspeed: Mapping[str, Any] | None = None,
) -> Probe:
    """Imports torch and torch_npu and takes NPU 0 in a child process.

    Args:
        timeout_s: seconds until the child counts as hung and is ended.
        environment: of the child; this process's when None.
        python: the interpreter to run it with.
        operators: names under `torch.ops.npu` to look for.
        mindspeed: switches to read MindSpeed's features with, where it is installed; None leaves it out.
    """
    # Autoloading would make torch_npu's failure look like torch's.
    variables = {**(os.environ if environment is None else environment), AUTOLOAD: "0"}
    # -P: the child's folder, with names such as device.py, is not put on its import path.
    command = [python, "-P", str(_CHILD), json.dumps(mindspeed), *operators]
    # Into files, not pipes: what torch_npu starts itself may live on and hold a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            code: int | None = subprocess.run(
                command, env=variables, check=False, stdout=output, stderr=errors, timeout=timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        told, last_line = _last_report(_text(output)), (_text(errors).strip().splitlines() or [""])[-1]
    late = f"no answer within {timeout_s:g} s"
    if "state" in told:
        return _result(told | ({"mindspeed_error": late} if code is None else {}))
    if code is None:
        return _result(told | {"state": ProbeState.HUNG, "error": late})
    error = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return _result(
        told | {"state": ProbeState.CRASHED, "error": f"{error}: {last_line}" if last_line else error}
    )


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _last_report(output: str) -> dict[str, Any]:
    """The last whole line that the child meant for us; whatever else libraries printed is passed over."""
    for line in reversed(output.splitlines()):
        if not line.startswith(MARKER):
            continue
        try:
            report: dict[str, Any] = json.loads(line.removeprefix(MARKER))
        except ValueError:
            continue  # cut off, or another thread wrote into it
        return report
    return {}


def _result(told: Mapping[str, Any]) -> Probe:
    lists = {name: tuple(told.get(name, ())) for name in ("missing", "mindspeed")}
    return Probe(**{**told, **lists, "state": ProbeState(told["state"])})
