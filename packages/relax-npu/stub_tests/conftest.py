"""Every test here runs on the real torch_npu over the stub of CANN; `nox -s npu_stub` prepares both."""

import pytest
import torch
import torch_npu  # noqa: F401 - without the stub this fails, and so should the tests
from host_execution import HostExecution
from relax_npu.schema import snapshot

# fla_npu cannot be built without CANN: its operators are there by their frozen schemas, for host_execution.
_FLA_NPU = torch.library.Library("npu", "FRAGMENT")
for _schema in snapshot("fla_npu", "v26.6.0").schemas.values():
    _FLA_NPU.define(_schema.text)


@pytest.fixture
def host():
    """Operators of the NPU are executed on the host."""
    with HostExecution() as mode:
        yield mode
