"""Two devices that train one model in bfloat16, against one device: loss, metrics and every gradient.

    python benchmarks/trainer/layouts.py                  # two GPUs over NCCL
    python benchmarks/trainer/layouts.py --device cpu     # two gloo processes

Starts its own ranks (no torchrun). Each layout trains three optimizer steps on ragged packed samples from the
same weights. The truth is the same training in float32 on one device. Rounding alone keeps one bfloat16
device away from it; the bound is that a layout is no further away. In each step, relative to the truth's
norm, the whole gradient may be 1.5 times as far off as one device's, the tensor that is furthest off 2.5
times as far as one device's furthest (the largest of some fifty random errors scatters), and the loss by
0.5 %. One JSON line a layout; the exit status is 1 if any is outside.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from typing import Any

from relax_core.testing import RankPool, Row
from relax_core.testing.training import Measured

FACTORS = {"gradient": 1.5, "tensor": 2.5}
LOSS = 5e-3
_MODEL = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
_MOE = {
    **{name: size for name, size in _MODEL.items() if name != "intermediate_size"},
    "num_experts": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_BOTH_OTHER_WAYS = {"context": 2, "context_attention": "heads", "context_delta": "state"}
_SP = {"tensor": 2, "sequence": True}
_EXPERTS: dict[str, Any] = {"family": "moe", "model": _MOE}
ROWS = (
    Row("tp2-sp", 2, _SP, mtp=1, model=_MODEL),
    Row("cp2", 2, {"context": 2}, mtp=1, model=_MODEL),
    Row("cp2-heads-state", 2, _BOTH_OTHER_WAYS, mtp=1, model=_MODEL),
    Row("pp2", 2, {"pipeline": 2}, mtp=1, model=_MODEL),
    Row("pp2-interleaved", 2, {"pipeline": 2, "pipeline_chunks": 2}, mtp=1, model=_MODEL),
    Row("dp2", 2, mtp=1, model=_MODEL),
    Row("dp2-overlap", 2, trainer=_OVERLAP, mtp=1, model=_MODEL),
    Row("ep2", 2, {"expert": 2}, mtp=1, **_EXPERTS),
    Row("ep2-tp2-sp", 2, {**_SP, "expert": 2, "expert_tensor": 1}, **_EXPERTS),
)


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


def main() -> int:
    """Prints one JSON line per layout; 1 if one is outside the bound."""
    parser = argparse.ArgumentParser(description="Two devices against one, in bfloat16.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", help="names of layouts")
    options = parser.parse_args()
    one, two = (RankPool(size, device=options.device, timeout_s=300) for size in (1, 2))
    known: dict[str, tuple[Measured, Measured]] = {}
    good = True
    try:
        for row in ROWS:
            if options.only and row.name not in options.only:
                continue
            started = time.perf_counter()
            alone = row.reference
            if repr(alone) not in known:
                known[repr(alone)] = (one.run(alone), one.run(replace(alone, precision="bf16")))
            truth, rounded = known[repr(alone)]
            try:
                got = distances(two.run(replace(row, precision="bf16")), truth)
            except RuntimeError as error:
                print(
                    json.dumps({"layout": row.name, "within": False, "error": str(error)[-1500:]}), flush=True
                )
                good = False
                continue
            base = distances(rounded, truth)
            within = all(
                mine["loss"] <= LOSS and all(mine[k] <= factor * theirs[k] for k, factor in FACTORS.items())
                for mine, theirs in zip(got, base, strict=True)
            )
            good &= within
            line = {
                "layout": row.name, "device": options.device, "within": within,
                "from_float32": [{k: float(f"{v:.2g}") for k, v in step.items()} for step in got],
                "one_device": [{k: float(f"{v:.2g}") for k, v in step.items()} for step in base],
                "seconds": round(time.perf_counter() - started, 1),
            }  # fmt: skip
            print(json.dumps(line), flush=True)
    finally:
        one.close()
        two.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
