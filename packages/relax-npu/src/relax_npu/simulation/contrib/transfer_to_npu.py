"""Importing this applies the simulation's transfer, as importing torch_npu's own applies that one."""

from relax_npu.simulation.transfer import apply

apply()
