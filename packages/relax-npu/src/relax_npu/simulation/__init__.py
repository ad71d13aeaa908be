"""A simulated NPU: a torch device named `npu` that executes on the CPU, with torch_npu and fla_npu beside it.

>>> from relax_npu.simulation import install
>>> install()  # doctest: +SKIP
>>> torch.ones(3, device="npu")  # doctest: +SKIP
tensor([1., 1., 1.], device='npu:0')

What it is for: to run the code written for the NPU where there is none, and to refuse what a device would
refuse. Tensors are real ones with memory of their own; an operator that meets tensors of the host and of the
NPU raises, and so does `.cuda()` from anywhere but megatron-core. The operators of torch_npu and fla_npu are
registered under the frozen schemas of the chosen releases and check layout, dtype and lengths on every call.
Collectives named `hccl` run over gloo and take the device's tensors only.

What it does not show: a kernel's own arithmetic, HCCL, memory, graphs and speed. Needs torch 2.11.
"""

from relax_npu.simulation.install import Simulation, install
from relax_npu.simulation.kernels import MixedDevicesError, executed
from relax_npu.simulation.registry import RefusedCallError
from relax_npu.simulation.transfer import StrayCudaError

__all__ = [
    "MixedDevicesError",
    "RefusedCallError",
    "Simulation",
    "StrayCudaError",
    "executed",
    "install",
]
