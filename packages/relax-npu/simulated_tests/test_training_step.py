"""The whole training step of a small model on the simulated NPU equals the CPU's: packing, MTP, losses,
optimizer, scores, import and export through the bridge; alone, and on two ranks over `hccl`."""

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("training_rank.py")
WRITE = runpy.run_path(str(SCRIPT))["write_checkpoint"]
EXPERTS = 4


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict]:
    """Trains in processes of their own and returns what rank 0 got; each setting once."""
    folder = tmp_path_factory.mktemp("training")
    for experts in (0, EXPERTS):
        WRITE(folder / f"checkpoint-{experts}", experts)

    def run(
        device: str, precision: str = "fp32", *, axis: str = "data", experts: int = 0, ranks: int = 1
    ) -> dict:
        name = f"{device}-{precision}-{axis}-{experts}-{ranks}"
        if not (folder / f"{name}-0.pt").exists():
            started = [_start(rank, ranks, device, precision, axis, experts, folder) for rank in range(ranks)]
            try:
                for process in started:
                    _, errors = process.communicate(timeout=400)
                    assert process.returncode == 0, errors.decode()[-4000:]
            finally:
                for process in started:
                    process.kill()
        return torch.load(folder / f"{name}-0.pt")

    return run


def _start(rank: int, ranks: int, device: str, *rest: object) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
        environment |= where | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    command = [sys.executable, str(SCRIPT), device, *map(str, rest)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


_PORTS: list[int] = []


def _port() -> int:
    """One port for all ranks of this process's tests."""
    if not _PORTS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            _PORTS.append(free.getsockname()[1])
    return _PORTS[0]


def assert_equal(got: dict, wanted: dict, *, relative: float, absolute: float) -> None:
    for mine, other in zip(got["steps"], wanted["steps"], strict=True):
        assert mine == pytest.approx(other, rel=relative, abs=absolute)
    for mine, other in zip(got["scores"], wanted["scores"], strict=True):
        torch.testing.assert_close(mine, other, rtol=relative, atol=absolute * 10)
    assert got["weights"].keys() == wanted["weights"].keys()
    for name, weight in got["weights"].items():
        torch.testing.assert_close(weight, wanted["weights"][name], rtol=0, atol=absolute * 10, msg=name)


@pytest.mark.parametrize("experts", [0, EXPERTS], ids=["dense", "experts"])
def test_two_steps_in_float32_equal_the_cpus(train, experts: int) -> None:
    # Round-off of float32 through two optimizer steps.
    assert_equal(train("npu", experts=experts), train("cpu", experts=experts), relative=1e-4, absolute=1e-6)


def test_the_npus_operators_served_the_step(train) -> None:
    executed = train("npu", "bf16")["executed"]
    for name in (
        *(
            "npu_fusion_attention",
            "npu_fusion_attention_grad",
            "npu_rms_norm_backward",
            "npu_swiglu_backward",
        ),
        *("npu_rotary_mul", "npu_causal_conv1d_bwd", "npu_chunk_fwd_o", "npu_prepare_wy_repr_bwd_full"),
    ):
        assert executed[f"npu.{name}"] > 0, name


def test_the_experts_operators_served_the_step(train) -> None:
    executed = train("npu", "bf16", experts=EXPERTS)["executed"]
    for name in ("npu_grouped_matmul", "npu_moe_token_permute_grad", "npu_moe_token_unpermute_grad"):
        assert executed[f"npu.{name}"] > 0, name


@pytest.mark.parametrize("experts", [0, EXPERTS], ids=["dense", "experts"])
def test_two_steps_in_bfloat16_stay_near_the_cpus(train, experts: int) -> None:
    """In bfloat16 other kernels round in other places: near, by its 8 bits, is what can be asked."""
    got, wanted = train("npu", "bf16", experts=experts), train("cpu", "bf16", experts=experts)
    for mine, other in zip(got["steps"], wanted["steps"], strict=True):
        for name in ("loss", "sft_loss", "mtp_loss_0", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-2), name


@pytest.mark.parametrize("experts", [0, EXPERTS], ids=["dense", "experts"])
def test_nothing_is_read_from_the_device_in_a_step(train, experts: int) -> None:
    """Five micro-batches, the norm, clipping and the optimizer; the numbers of a step are read after it."""
    assert train("npu", "bf16", experts=experts)["waits"] == [0, 0]


@pytest.mark.parametrize(
    ("axis", "experts"), [("data", 0), ("tensor", 0), ("context", 0), ("expert", EXPERTS)]
)
def test_two_ranks_over_hccl_equal_one(train, axis: str, experts: int) -> None:
    shared, alone = train("npu", ranks=2, axis=axis, experts=experts), train("cpu", experts=experts)
    assert_equal(shared, alone, relative=1e-4, absolute=1e-6)
