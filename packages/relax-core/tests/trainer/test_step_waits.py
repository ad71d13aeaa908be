"""A step reads nothing from the device; its numbers are read afterwards, and may be read later still."""

import json
import pickle
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from relax_core.device.readback import Readback
from relax_core.loop import objectives, preferences, values
from relax_core.packing.pictures import RowPictures
from relax_core.testing import Row
from relax_core.testing.table import ALGORITHMS
from relax_core.testing.task import step_samples
from relax_core.testing.training import make_objective, make_trainer
from relax_core.trainer import trainer as trainer_module
from relax_core.trainer.optimizer import clip_factor
from relax_core.trainer.ranks import metrics_message
from relax_core.trainer.sample import MicroBatch
from relax_kernels.ops import experts, logprob
from relax_kernels.torch_backend import logprob as reference
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")


class Watch(TorchDispatchMode):
    """Names the calls whose result, of a tensor on a device, the host would have to wait for."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.")
        if name.startswith(WAITS):
            self.waits.append(name)
        return function(*args, **(kwargs or {}))


def unwatched(function):
    def call(*args, **options):
        with _disable_current_modes():
            return function(*args, **options)

    return call


@pytest.fixture
def watch(monkeypatch):
    """A `Watch` that does not see what is computed of the samples, which lie on the host wherever the model
    is, and what operators look at where tensors lie on the host."""
    for owner, name in (
        (MicroBatch, "pack"),
        (RowPictures, "placed"),
        (trainer_module, "draft_denominators"),
        *((objectives, name) for name in ("weigh", "target_counts", "token_columns", "target_places")),
        (preferences, "target_counts"),
        *((values, name) for name in ("weigh", "target_counts")),
        (logprob, "linear_logprob_call"),
        (reference, "_chunks"),
        (experts, "sort_by_expert_call"),
    ):
        monkeypatch.setattr(owner, name, unwatched(getattr(owner, name)))
    return Watch()


ROWS = [
    Row("sft", 1, mtp=2, trainer={"micro_batch_tokens": 16}),
    Row("policy", 1, mtp=1, objective="policy", trainer={"micro_batch_tokens": 16, "recompute": "full"}),
    *(Row(name, 1, objective=name) for name in (*ALGORITHMS, "value")),
    Row("moe", 1, family="moe", mtp=1, balance=0.5),
    Row("lora", 1, lora={"rank": 3, "alpha": 6.0}),
    Row("pictures", 1, pictures="trained", mtp=1),
]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_a_step_waits_for_nothing(cpu_world, watch, row):
    trainer, _ = make_trainer(row, cpu_world)
    samples, objective = step_samples(row)[0], make_objective(row)
    with watch:
        metrics = trainer.step(samples, objective)
    assert watch.waits == []
    assert metrics.values["grad_norm"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_waits_for_nothing_on_cuda(precision):
    # The reference of the experts' products, which serves widths as odd as here, reads their sizes.
    rows = [{**asdict(row), "precision": precision} for row in ROWS if row.family == "dense"]
    program = Path(__file__).with_name("waits_on_cuda.py")
    done = subprocess.run(
        [sys.executable, program, json.dumps(rows)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "done\n", done.stdout + done.stderr[-2000:]


def test_the_watch_sees_a_number_that_is_read(cpu_world, watch):
    trainer, _ = make_trainer(ROWS[0], cpu_world)
    with watch:
        trainer.step(step_samples(ROWS[0])[0], make_objective(ROWS[0])).values  # noqa: B018
    assert watch.waits


class InFlight(Readback):
    """A copy that arrives when it is waited for."""

    ready = False

    def read(self):
        self.ready = True
        return super().read()


@pytest.mark.parametrize("row", [ROWS[0], ROWS[-3]], ids=lambda row: row.name)
def test_numbers_read_steps_later_are_those_read_at_once(cpu_world, monkeypatch, row):
    monkeypatch.setattr(trainer_module, "Readback", InFlight)
    at_once, later = (make_trainer(row, cpu_world)[0] for _ in range(2))
    objective = make_objective(row)
    wanted = [at_once.step(samples, objective).values for samples in step_samples(row)]
    steps = [later.step(samples, objective) for samples in step_samples(row)]
    assert [step.ready for step in steps] == [False] * 3
    assert [step.values for step in steps] == wanted
    assert all(step.ready for step in steps)


def test_only_numbers_travel(cpu_world):
    trainer, _ = make_trainer(ROWS[0], cpu_world)
    step = trainer.step(step_samples(ROWS[0])[0], make_objective(ROWS[0]))
    copy = pickle.loads(pickle.dumps(step))
    assert (copy.values, copy.tokens, copy.flops, copy.ready) == (step.values, step.tokens, step.flops, True)


@pytest.mark.parametrize("norm", [0.3, 0.7, 1.0, 3.7, 123.4567, 1e30])
@pytest.mark.parametrize("limit", [0.0, 0.3, 1.0])
def test_the_clip_factor_is_the_quotient_rounded_once(norm, limit):
    wanted = torch.tensor(limit / norm if 0 < limit < norm else 1.0)
    assert torch.equal(clip_factor(torch.tensor(norm, dtype=torch.float64), limit), wanted)


@pytest.mark.parametrize("norm", [torch.nan, torch.inf])
def test_a_norm_that_is_not_finite_leaves_the_step_out(norm):
    assert clip_factor(torch.tensor(norm, dtype=torch.float64), 1.0).isnan()


def test_more_metrics_than_stages_can_tell_are_refused():
    with pytest.raises(ValueError, match=r"300 metrics of 1799 letters: .* let the objective report fewer"):
        metrics_message([f"m{i:04}" for i in range(300)], torch.zeros(300, dtype=torch.float64))
