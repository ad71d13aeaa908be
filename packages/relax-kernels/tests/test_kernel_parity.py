"""Every backend that is present against float64 references: values and all gradients."""

import pytest
from relax_kernels.testing import Case, NotServed, Target, parity_cases


@pytest.mark.parametrize("case", parity_cases(), ids=lambda case: case.name)
def test_equals_the_reference(case: Case, target: Target) -> None:
    try:
        case.check(target)
    except NotServed as reason:
        pytest.skip(str(reason))


def test_names_are_unique() -> None:
    names = [case.name for case in parity_cases()]
    assert len(set(names)) == len(names)
