"""Run the delta rule's kernels for Hopper on the CPU against the torch backend; exits 0 if they agree.

The gluon kernels in the emulator, the two triton kernels around them in Triton's interpreter. First with
float32 in the place of bfloat16, to see the formulas; then rounded, with gates at their ends, to see what
rounding does.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace
from typing import Any

import torch
from gluon_emulator import Descriptor, emulate
from interpreted import TARGET, accept_arrays_of_one, cases, check_cases, results
from relax_kernels import CuSeqlens
from relax_kernels.testing import assert_near
from relax_kernels.torch_backend.backend import IMPLEMENTATIONS
from relax_kernels.triton_backend import delta_launch, delta_rule, hopper_launch

NAMES = ("o", "final state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")
PREPARE = delta_launch.prepare
KERNELS = {
    name: getattr(hopper_launch, name) for name in ("scan_kernel", "scan_backward_kernel", "gradients_kernel")
}


def emulate_hopper(low: torch.dtype) -> None:
    for name, kernel in KERNELS.items():
        setattr(hopper_launch, name, emulate(kernel, low))
    hopper_launch.TensorDescriptor = Descriptor
    hopper_launch.serves = lambda problem: problem.table.chunks > 0
    hopper_launch.multiprocessors = lambda device: 3

    def prepare(problem: Any) -> Any:
        # The interpreter multiplies float32 only.
        tables = PREPARE(replace(problem, inputs=tuple(x.float() for x in problem.inputs)))
        rounded = (x.to(low).float() for x in (tables.inverse_MUCC, tables.scores_MUCC))
        return replace(tables, **dict(zip(("inverse_MUCC", "scores_MUCC"), rounded, strict=True)))

    delta_launch.prepare = prepare


def check(
    lengths: tuple[int, ...],
    heads: tuple[int, int, int],
    decay: tuple[float, float],
    beta: tuple[float, float],
    allowed: float,
    low: torch.dtype,
    l2norm: bool = True,
) -> None:
    (H, U, D), cu = heads, CuSeqlens.from_lengths(lengths)
    T = cu.total
    q, k, v = (
        TARGET.normal(T, n, D, seed=seed).detach().to(low).float().requires_grad_()
        for seed, n in enumerate((H, H, U))
    )
    g = TARGET.uniform(T, U, low=decay[0], high=decay[1], seed=4)
    step = TARGET.uniform(T, U, low=beta[0], high=beta[1], seed=5)
    options = {"cu_seqlens": cu, "output_final_state": True, "qk_l2norm": l2norm, "scale": 0.2}
    options["initial_state_NUKV"] = TARGET.normal(len(lengths), U, D, D, seed=6)
    emulate_hopper(low)
    expected = results(IMPLEMENTATIONS["gated_delta_rule"], (q, k, v, g, step), options)
    actual = results(delta_rule.gated_delta_rule, (q, k, v, g, step), options)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert_near(a, e, allowed, f"{name} of {lengths} {heads} {decay} {beta}")
    print(lengths, heads, decay, beta, low, "agrees")


def main() -> None:
    accept_arrays_of_one()
    check((65, 0, 3, 130), (1, 2, 64), (-1.0, 0.0), (0.0, 1.0), 1e-5, torch.float32)
    check((70, 1), (2, 2, 128), (-1.0, 0.0), (0.0, 1.0), 1e-5, torch.float32)
    for decay in ((-90.0, -60.0), (-40.0, 0.0), (0.0, 0.0)):
        check((100, 9), (1, 2, 64), decay, (0.0, 1.0), 2e-2, torch.bfloat16)
    for beta in ((0.0, 0.0), (1.0, 1.0)):
        check((100, 9), (1, 2, 64), (-1.0, 0.0), beta, 2e-2, torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        emulate_hopper(dtype)
        check_cases(cases(dtype, {"gated_delta_rule"}))


if __name__ == "__main__":
    main()
