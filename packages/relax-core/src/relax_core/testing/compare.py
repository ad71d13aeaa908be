"""What differs between the training of a layout and its reference."""

import math

import torch
from torch import Tensor

from relax_core.testing.training import Measured


def differences(got: Measured, want: Measured, *, rel: float, floor: float) -> list[str]:
    """One line per number that is off; empty if the two trainings are equal.

    Args:
        got: a layout's.
        want: the reference's.
        rel: bound of a metric's error relative to its value, and of a tensor's largest error relative to its
            own largest value.
        floor: errors below it never count; for gradients it is relative to the largest gradient of the model,
            because a gradient that is 0 in exact arithmetic is noise of that size.
    """
    lines: list[str] = []
    for step, (mine, theirs) in enumerate(zip(got.metrics, want.metrics, strict=True), start=1):
        lines += [f"step {step}: metrics {sorted(mine.keys() ^ theirs.keys())} are on one side only"] * (
            mine.keys() != theirs.keys()
        )
        lines += [
            f"step {step}: {name} is {mine[name]!r} instead of {value!r}"
            for name, value in theirs.items()
            if name in mine and not math.isclose(mine[name], value, rel_tol=rel, abs_tol=floor)
        ]
    for step, (grads, wanted) in enumerate(zip(got.gradients, want.gradients, strict=True), start=1):
        scale = max(float(grad.abs().max()) for grad in wanted.values())
        lines += _tensors(f"step {step}: gradient of", grads, wanted, rel, floor * scale)
    lines += _tensors("weight", got.weights, want.weights, rel, floor)
    scores = {str(i): x for i, x in enumerate(got.scores)}, {str(i): x for i, x in enumerate(want.scores)}
    return lines + _tensors("scores of sample", *scores, rel, floor)


def _tensors(
    what: str, got: dict[str, Tensor], want: dict[str, Tensor], rel: float, floor: float
) -> list[str]:
    lines = [f"{what} {name} is on one side only" for name in sorted(got.keys() ^ want.keys())]
    for name in got.keys() & want.keys():
        if got[name].shape != want[name].shape:
            lines.append(f"{what} {name} has shape {tuple(got[name].shape)} not {tuple(want[name].shape)}")
            continue
        gap = torch.nan_to_num((got[name].double() - want[name].double()).abs(), nan=math.inf)
        largest, size = float(gap.max()), float(want[name].abs().max())
        if largest > rel * size + floor:
            lines.append(f"{what} {name} is off by {largest:.3g} (largest value {size:.3g})")
    return lines
