"""Two devices that train one model in bfloat16, against one device: loss, every gradient, and speed.

    python benchmarks/trainer/layouts.py                           # two GPUs over NCCL, 250 s at most
    python benchmarks/trainer/layouts.py --parts speed --only cp2 dp2    # no limit of time: --seconds 3600
    python benchmarks/trainer/layouts.py --device cpu --tiny       # two gloo processes

Starts its own ranks (no torchrun). One JSON line a layout, at once; what fails in one layout is in its line
and does not touch the others. The exit status is 1 if any failed or is outside the bound.

Part "parity": each layout trains three optimizer steps on ragged packed samples from the same weights. The
truth is the same training in float32 on one device. Rounding alone keeps one bfloat16 device away from it;
the bound is that a layout is no further away. In each step, relative to the truth's norm, the whole gradient
may be 1.5 times as far off as one device's, the tensor that is furthest off 2.5 times as far as one device's
furthest (the largest of some fifty random errors scatters), and the loss by 1 % (the second step has two
targets). Every token of the model with experts uses all of them: with fewer, rounding sends tokens to other
experts, and one bfloat16 device is a quarter of the gradient away from the truth, in which faults would hide.

Part "speed": see `layout_speed.py` beside this file. Part "more": further layouts, compared as in "parity".
Part "float32": all of these layouts in float32, where no rounding hides a fault: of the truth's norm the
whole gradient may be off by 1e-4, any tensor and the loss by 1e-3.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from layout_speed import speed_lines
from relax_core.testing import RankError, RankPool, Row
from relax_core.testing.training import Measured

FACTORS = {"gradient": 1.5, "tensor": 2.5}
LOSS = 1e-2
EXACT = {"gradient": 1e-4, "tensor": 1e-3, "loss": 1e-3}
_MODEL = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
_MOE = {
    **{name: size for name, size in _MODEL.items() if name != "intermediate_size"},
    "num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_BOTH_OTHER_WAYS = {"context": 2, "context_attention": "heads", "context_delta": "state"}
_SP = {"tensor": 2, "sequence": True}
_EXPERTS: dict[str, Any] = {"family": "moe", "model": _MOE}
PARITY = (
    Row("tp2-sp", 2, _SP, mtp=1, model=_MODEL),
    Row("cp2", 2, {"context": 2}, mtp=1, model=_MODEL),
    Row("pp2", 2, {"pipeline": 2}, mtp=1, model=_MODEL),
    Row("dp2", 2, mtp=1, model=_MODEL),
    Row("ep2", 2, {"expert": 2}, mtp=1, **_EXPERTS),
)
MORE = (
    Row("cp2-heads-state", 2, _BOTH_OTHER_WAYS, mtp=1, model=_MODEL),
    Row("dp2-overlap", 2, trainer=_OVERLAP, mtp=1, model=_MODEL),
    Row("pp2-interleaved", 2, {"pipeline": 2, "pipeline_chunks": 2}, mtp=1, model=_MODEL),
    Row("ep2-tp2-sp", 2, {**_SP, "expert": 2, "expert_tensor": 1}, mtp=1, **_EXPERTS),
)
Pair = tuple[Measured, Measured]


def distances(got: Measured, truth: Measured) -> list[dict[str, float]]:
    """Of each step: how far the gradient (all tensors; the furthest one) and the loss are from the truth."""
    found = []
    for step, wanted in enumerate(truth.gradients):
        off = {name: float((got.gradients[step][name] - g).square().sum()) for name, g in wanted.items()}
        size = {name: float(g.square().sum()) for name, g in wanted.items()}
        total = sum(size.values())
        # A tensor whose gradient is next to nothing is measured against a thousandth of the whole.
        each = {name: math.sqrt(off[name] / max(size[name], total * 1e-6)) for name in off}
        loss = truth.metrics[step]["loss"]
        found.append(
            {
                "gradient": math.sqrt(sum(off.values()) / total),
                "tensor": max(each.values()),
                "loss": abs(got.metrics[step]["loss"] - loss) / abs(loss),
            }
        )
    return found


def compare_exact(got: Measured, truth: Measured) -> dict[str, Any]:
    """The figures of a layout's line, of float32."""
    mine = distances(got, truth)
    return {
        "within": all(step[k] <= bound for step in mine for k, bound in EXACT.items()),
        "from_one_device": [{k: float(f"{v:.2g}") for k, v in step.items()} for step in mine],
    }


def compare(got: Measured, pair: Pair) -> dict[str, Any]:
    """The figures of a layout's line."""
    truth, rounded = pair
    mine, base = distances(got, truth), distances(rounded, truth)
    # NaN is within nothing.
    within = all(
        step["loss"] <= LOSS and all(step[k] <= factor * theirs[k] for k, factor in FACTORS.items())
        for step, theirs in zip(mine, base, strict=True)
    )
    return {
        "within": within,
        "from_float32": [{k: float(f"{v:.2g}") for k, v in step.items()} for step in mine],
        "one_device": [{k: float(f"{v:.2g}") for k, v in step.items()} for step in base],
    }


class Parity:
    """Compares layouts; one device works on what they are compared with while two work on them."""

    def __init__(self, one: RankPool, two: RankPool, deadline: float) -> None:
        self.one, self.two, self.deadline = one, two, deadline
        self.beside = ThreadPoolExecutor(1)
        self.pairs: dict[str, Future[Pair]] = {}

    def lines(self, rows: Sequence[Row], *, exact: bool) -> bool:
        """Prints one per row, in float32 if `exact`; whether all are within the bound."""
        for alone in (row.reference for row in rows):
            if repr(alone) not in self.pairs:
                self.pairs[repr(alone)] = self.beside.submit(self._pair, alone)
        within = [self._line(row, exact=exact) for row in rows]
        return all(within)

    def _pair(self, alone: Row) -> Pair:
        return self.one.run(alone), self.one.run(replace(alone, precision="bf16"))

    def _line(self, row: Row, *, exact: bool) -> bool:
        line: dict[str, Any] = {
            "part": "float32" if exact else "parity",
            "layout": row.name,
            "device": self.two.device,
        }
        started = time.perf_counter()
        if time.monotonic() > self.deadline:
            line |= {"within": False, "skipped": "no time was left"}
        else:
            try:
                got = self.two.run(row if exact else replace(row, precision="bf16"))
                pair = self.pairs[repr(row.reference)].result()
                line |= compare_exact(got, pair[0]) if exact else compare(got, pair)
            except RankError as error:
                line |= {"within": False, "error": str(error)[-1500:]}
        print(json.dumps({**line, "seconds": round(time.perf_counter() - started, 1)}), flush=True)
        return bool(line["within"])


def main() -> int:
    """Prints one JSON line per layout; 1 if one failed or is outside the bound."""
    parser = argparse.ArgumentParser(description="Two devices against one, in bfloat16.")
    parser.add_argument("--device", default="cuda")
    parts = ("parity", "speed", "more", "float32")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--only", nargs="+", help="names of layouts")
    parser.add_argument("--seconds", type=float, default=250, help="layouts not begun by then are skipped")
    parser.add_argument("--timeout-s", type=float, default=75, help="of one layout")
    parser.add_argument("--tokens", type=int, default=32768, help="speed: of each of the two samples")
    parser.add_argument("--layers", type=int, default=12, help="speed: of the trunk")
    parser.add_argument("--steps", type=int, default=4, help="speed: that are timed")
    parser.add_argument("--tiny", action="store_true", help="speed: small sizes, to try the script out")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    one, two = (RankPool(size, device=options.device, timeout_s=options.timeout_s) for size in (1, 2))
    good = True
    parity = Parity(one, two, deadline)
    try:
        for part in parts:
            if part not in options.parts:
                continue
            if part == "speed":
                good &= speed_lines(options, one, two, deadline)
            else:
                rows = {"parity": PARITY, "more": MORE, "float32": PARITY + MORE}[part]
                chosen = [row for row in rows if not options.only or row.name in options.only]
                good &= parity.lines(chosen, exact=part == "float32")
    finally:
        parity.beside.shutdown(cancel_futures=True)
        one.close()
        two.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
