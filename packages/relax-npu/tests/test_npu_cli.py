"""The command, run as a person or a script runs it, on machines without an NPU."""

import json

import pytest
from relax_npu.operators.table import needed_operators

CLI = ("-m", "relax_npu.cli")


def test_version(bench) -> None:
    done = bench.run(*CLI, "--version")
    assert (done.returncode, done.stdout) == (0, "relax-npu 0.1.0\n")


def test_no_command_is_an_error(bench) -> None:
    done = bench.run(*CLI)
    assert done.returncode == 2
    assert "COMMAND" in done.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "nan", "inf", "1e9"])
def test_a_timeout_that_makes_no_sense(bench, seconds: str) -> None:
    done = bench.run(*CLI, "doctor", f"--timeout={seconds}")
    assert done.returncode == 2
    assert f"{seconds} is no number of seconds above 0" in done.stderr


def test_the_doctor_on_a_bare_machine(bench) -> None:
    done = bench.run(*CLI, "doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["ok"] is False
    assert report["relax_npu"] == "0.1.0"
    errors = {finding["check"]: finding for finding in report["findings"] if finding["status"] == "error"}
    assert {"device-files", "driver", "cann", "torch-npu"} <= set(errors)
    assert all(finding["fix"] for finding in errors.values())
    assert errors["torch-npu"]["message"] == "torch is not installed"


def test_the_doctor_survives_a_torch_npu_without_cann(bench) -> None:
    bench.torch()
    bench.torch_npu(source=bench.no_cann)
    done = bench.run(*CLI, "doctor")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "libhccl.so" in done.stdout
    assert "set_env.sh" in done.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout


def test_the_timeout_reaches_the_probe(bench) -> None:
    bench.torch()
    bench.torch_npu(source="import time; time.sleep(600)")
    done = bench.run(*CLI, "doctor", "--timeout", "1")
    assert "`import torch_npu` hangs: no answer within 1 s" in done.stdout


FLA_NPU = """
    import torch
    for name in {names}: setattr(torch.ops.npu, name, None)
"""


def operators_of(bench) -> dict:
    report = json.loads(bench.run(*CLI, "doctor", "--json").stdout)
    return {finding["check"]: finding for finding in report["findings"]}["operators"]


def test_the_doctor_says_which_operators_run_as_plain_torch(bench) -> None:
    bench.torch()
    bench.torch_npu()
    found = operators_of(bench)
    assert found["status"] == "warning"
    assert "gated_delta_rule" in found["message"]
    assert "39bbde7c55f2" in found["fix"]


def test_the_doctor_finds_operators_that_fla_npu_registers(bench) -> None:
    bench.torch()
    bench.torch_npu()
    bench.module("fla_npu", FLA_NPU.format(names=list(needed_operators())))
    assert operators_of(bench)["status"] == "ok"


def test_the_doctor_says_why_fla_npu_does_not_load(bench) -> None:
    bench.torch()
    bench.torch_npu()
    bench.module("fla_npu", "raise RuntimeError('CANN environment is not initialized')")
    found = operators_of(bench)
    assert "fla_npu does not load: RuntimeError: CANN environment is not initialized" in found["message"]


@pytest.mark.parametrize("name", ["中文", "\udcff"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_names_that_the_terminal_cannot_show(bench, name: str, options: list[str]) -> None:
    done = bench.run(
        *CLI, "doctor", *options, ASCEND_HOME_PATH=f"/opt/{name}", PYTHONIOENCODING="ascii", PYTHONUTF8="1"
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "\\u4e2d" in done.stdout or "\\udcff" in done.stdout
