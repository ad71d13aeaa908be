"""MFU: which device is meant, and the share by hand."""

import io

import pytest
from relax_core.config import load_config
from relax_core.loop.metrics import training_metrics
from relax_core.loop.mfu import peak_flops, spec_of
from relax_core.run import Recorder, RunDirectory
from relax_core.trainer.step_metrics import StepMetrics
from rich.console import Console


def test_the_driver_s_name_is_found_in_the_table():
    assert spec_of("NVIDIA H200") == "h200"
    assert spec_of("NVIDIA H100 80GB HBM3") == "h100"
    assert spec_of("NVIDIA A100-SXM4-80GB") == "a100"
    assert spec_of("NVIDIA GeForce RTX 4090") is None
    assert spec_of("cpu") is None
    # CANN's names: a 910C card shows its two dies as two of these; a 910B is another chip.
    assert spec_of("Ascend910_9391") == spec_of("Ascend910_9362") == "910c-die"
    assert spec_of("Ascend910B2") is None


@pytest.mark.parametrize(
    ("flags", "chip", "peak"),
    [
        (("--trainer.precision=bf16",), "NVIDIA H200", 989.5e12),
        (("--trainer.precision=fp32",), "NVIDIA H200", 67e12),
        (("--trainer.precision=bf16",), "NVIDIA A100-SXM4-80GB", 312e12),
        (("--trainer.precision=fp32",), "NVIDIA A100-SXM4-80GB", 19.5e12),
        (("--trainer.precision=bf16",), "Ascend910_9391", 376e12),
        (("--trainer.precision=fp32",), "Ascend910_9391", None),
        (("--trainer.precision=bf16",), "cpu", None),
        (("--trainer.precision=bf16", "--cluster.mode=ray", "--cluster.trainer_ranks=4"), "NVIDIA H200",
         4 * 989.5e12),
    ],
)  # fmt: skip
def test_the_peak_is_of_all_ranks_in_their_precision_and_only_where_it_is_known(flags, chip, peak):
    assert peak_flops(load_config("quickstart", ["--run.device=auto", *flags]), lambda: chip) == peak


def test_on_a_cpu_no_driver_is_asked():
    assert peak_flops(load_config("quickstart", ["--run.device=cpu"]), pytest.fail) is None


def test_mfu_is_operations_over_time_and_peak(tmp_path):
    # Two optimizer steps of 3e12 operations in 4 seconds of training, at a peak of 1e13: 15 %.
    metrics = training_metrics([StepMetrics({"loss": 1.0}, tokens=5, flops=3e12)] * 2)
    assert metrics["train_flops"] == 6e12
    config, now = load_config("quickstart", ["--run.progress=none"]), [0.0]
    console = Console(file=io.StringIO())
    with RunDirectory.create(tmp_path / "run", config) as directory:
        recorder = Recorder(directory, config, clock=lambda: now[0], age=0.0, console=console)
        recorder.peak_flops = 1e13
        with recorder:
            with recorder.phase("train"):
                now[0] += 4
            now[0] += 4
            assert recorder.step(1, metrics)["time"]["mfu"] == pytest.approx(0.15)
            assert "mfu" not in recorder.step(2, {"train_flops": 1.0})["time"], "nothing was trained"
