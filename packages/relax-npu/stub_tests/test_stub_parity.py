"""The parity suite of relax-kernels on the real torch_npu: its dispatch, device, views, autograd."""

import pytest
from relax_kernels.testing import Case, NotServed, Target, parity_cases
from relax_npu.operators import CAPABILITIES

ASCEND = Target("ascend", "npu")
SERVED = {case.name: case for case in parity_cases() if case.op in {c.operator for c in CAPABILITIES}}


@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
def test_ascend_equals_the_reference_on_the_real_torch_npu(host, case: Case) -> None:
    try:
        case.check(ASCEND)
    except NotServed as reason:
        pytest.skip(str(reason))
