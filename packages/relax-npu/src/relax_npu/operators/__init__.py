"""`ascend`: the operators of relax-kernels on the Ascend NPU, through torch_npu and fla_npu.

Entry point `relax_kernels.backends`: `ascend`. What it has, for which calls, and what carries the backward
pass is the capability table (`relax_npu.operators.table`), from which docs/npu.md and `relax-npu schema` are
made. Every call of an NPU operator is written as `torch.ops.npu.<name>(...)`, so that the contract tests find
it and bind it against the frozen schemas of each supported release.
"""

from relax_npu.operators.backend import AscendBackend, create
from relax_npu.operators.table import CAPABILITIES, Capability

__all__ = ["CAPABILITIES", "AscendBackend", "Capability", "create"]
