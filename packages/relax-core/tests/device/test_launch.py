"""A process becomes a trainer rank: alone without a port, or under a launcher's environment."""

import contextlib
import os
import socket
import sys

import psutil
import pytest
import torch
import torch.distributed as dist
from relax_core.device import ParallelConfig, get_device, initialise, shutdown


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    shutdown()
    yield
    shutdown()


def test_one_process_needs_no_launcher_and_can_start_again():
    for _ in range(2):
        world = initialise("cpu")
        assert (world.rank, world.size, world.data_parallel_size) == (0, 1, 1)
        assert world.torch_device == torch.device("cpu")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 1
        shutdown()
        assert not dist.is_initialized()


def test_a_busy_rendezvous_port_does_not_matter():
    with socket.socket() as taken:
        # Where somebody else holds the port it is as busy.
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        bound = taken.getsockname()[1] == 29500
        initialise("cpu")
        listening = [c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
        assert listening.count(29500) == bound


def test_starting_twice_is_refused():
    initialise("cpu")
    with pytest.raises(RuntimeError, match="call shutdown"):
        initialise("cpu")


def test_seed_sets_every_generator():
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def draws() -> list[float]:
        initialise("cpu", seed=5)
        values = [torch.rand(1).item()]
        with get_cuda_rng_tracker().fork():
            values.append(torch.rand(1).item())
        shutdown()
        return values

    first = draws()
    torch.rand(10)
    assert draws() == first
    assert first[0] != first[1]


def test_a_deterministic_process_says_so_to_torch_and_to_libraries_until_it_ends(monkeypatch):
    device = get_device("cpu")
    monkeypatch.setattr(type(device), "deterministic_variables", {"SOME_LIBRARY": "exact"})
    monkeypatch.delenv("SOME_LIBRARY", raising=False)
    initialise(device, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["SOME_LIBRARY"] == "exact"
    finally:
        shutdown()
        monkeypatch.delenv("SOME_LIBRARY")
    assert not torch.are_deterministic_algorithms_enabled()


def test_sizes_that_do_not_divide_the_world_are_refused():
    with pytest.raises(ValueError, match="1 ranks do not divide by tensor 2 x pipeline 1 x context 1 = 2"):
        initialise("cpu", ParallelConfig(tensor=2))
    assert not dist.is_initialized()


def test_half_a_launcher_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT is not"):
        initialise("cpu")


def test_two_ranks_meet_under_a_launcher(run_ranks):
    code = (
        "import torch, torch.distributed as dist\n"
        "from relax_core.device import initialise, shutdown, ParallelConfig\n"
        "world = initialise('cpu', ParallelConfig(tensor=2))\n"
        "from megatron.core import parallel_state as p\n"
        "x = torch.tensor([float(world.rank + 1)])\n"
        "dist.all_reduce(x, group=p.get_tensor_model_parallel_group())\n"
        "print(world.rank, world.data_parallel_size, x.item()); dist.barrier(); shutdown()"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = [{**base, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    printed = run_ranks([sys.executable, "-W", "ignore", "-c", code], variables)
    assert [line.strip() for line in printed] == ["0 1 3.0", "1 1 3.0"]


def test_a_rank_that_dies_ends_its_partners_at_once_and_is_named(run_ranks):
    code = (
        "import os, threading\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise RuntimeError('out of luck')\n"
        "threading.Event().wait()"
    )
    with pytest.raises(AssertionError, match=r"rank 0 ended with -9(.|\n)*rank 1 ended with 1(.|\n)*luck"):
        run_ranks([sys.executable, "-c", code], [{"RANK": "0"}, {"RANK": "1"}])
