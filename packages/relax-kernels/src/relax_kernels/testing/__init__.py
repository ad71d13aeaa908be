"""The parity suite every backend must pass, also those that live in other packages.

    >>> from relax_kernels.testing import NotServed, Target, parity_cases
    >>> target = Target("torch", "cpu")
    >>> for case in parity_cases():
    ...     try:
    ...         case.check(target)
    ...     except NotServed as reason:
    ...         print(case.name, "not served:", reason)

A case compares values and every gradient with a float64 reference written independently of the backends;
while it runs, uninitialised memory is full of NaN.
"""

from relax_kernels.testing.cases import Case, parity_cases
from relax_kernels.testing.compare import TOLERANCE, assert_near, grads_of, tolerance
from relax_kernels.testing.memory import nan_in_new_memory
from relax_kernels.testing.target import NotServed, Target, targets

__all__ = [
    "TOLERANCE",
    "Case",
    "NotServed",
    "Target",
    "assert_near",
    "grads_of",
    "nan_in_new_memory",
    "parity_cases",
    "targets",
    "tolerance",
]
