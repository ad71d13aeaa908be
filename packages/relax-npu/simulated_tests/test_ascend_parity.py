"""The parity suite of relax-kernels on the simulated NPU: values and gradients against float64."""

import pytest
from relax_kernels.testing import Case, NotServed, Target, parity_cases
from relax_npu.operators import CAPABILITIES
from relax_npu.operators.table import BY_TORCH

ASCEND = Target("ascend", "npu")
SERVED = {case.name: case for case in parity_cases() if case.op in {c.operator for c in CAPABILITIES}}


@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
def test_ascend_equals_the_reference(case: Case) -> None:
    try:
        case.check(ASCEND)
    except NotServed as reason:
        pytest.skip(str(reason))


LEFT = {case.name: case for case in parity_cases() if case.op in BY_TORCH}


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_what_is_left_to_torch_runs_on_the_npu(case: Case) -> None:
    case.check(Target("torch", "npu"))
