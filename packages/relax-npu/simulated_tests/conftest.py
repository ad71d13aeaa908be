"""Every test here runs in a process whose `npu` is the simulated one."""

import os

import pytest
import torch
from relax_npu.simulation import Simulation, install

SIMULATION = install(fla_npu=os.environ.get("RELAX_SIMULATED_FLA_NPU", "v26.6.0"), visible=2)


@pytest.fixture
def simulation() -> Simulation:
    return SIMULATION


@pytest.fixture
def npu() -> torch.device:
    return torch.device("npu", 0)
