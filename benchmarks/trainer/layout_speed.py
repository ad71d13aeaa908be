"""How much faster two devices take an optimizer step than one; `layouts.py` runs it.

A batch of two samples of 32k tokens, each a row of its own, through the 1.88 B shape with 12 of its 24 layers
(1.2 B weights with the vocabulary of 248,320), bfloat16, AdamW, nothing recomputed: forward, backward,
reduction, clipping and update, as `Trainer.step` does them. One device takes the rows one after the other;
tensor- and context-parallel ranks share each, data-parallel ones take one each, pipeline stages pass them on.
`speedup` is one device's time over that of the two, `efficiency` half of it. Weights and batch are the same
everywhere: the loss of the first step has to be within 0.5 % of one device's and the gradient norm within
5 %, or no time is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from relax_core.testing import RankError, RankPool, Row

BOUNDS = {"loss": 5e-3, "grad_norm": 5e-2}
_SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "vocab_size": 248320, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
_TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp2": {"parallel": {"context": 2}},
    "tp2-sp": {"parallel": {"tensor": 2, "sequence": True}},
    "dp2": {},
    "dp2-overlap": {"trainer": _OVERLAP},
    "pp2": {"parallel": {"pipeline": 2}},
    "cp2-heads-heads": {"parallel": {"context": 2, "context_attention": "heads"}},
    "cp2-gather-state": {"parallel": {"context": 2, "context_delta": "state"}},
}


def speed_lines(options: argparse.Namespace, one: RankPool, two: RankPool, deadline: float) -> bool:
    """Prints a line for one device and for every layout of two; whether all worked and were right.

    Args:
        options: `tokens`, `layers`, `steps`, `tiny`, `only`, `device`.
        one, two: the ranks; those of one device are ended, so that its memory is free again.
        deadline: of `time.monotonic`; what has not begun by then is skipped.
    """
    tokens, layers = (512, 4) if options.tiny else (options.tokens, options.layers)
    sizes: dict[str, Any] = {"model": _TINY if options.tiny else _SHAPE, "layers": layers}
    sizes["precision"] = "fp32" if options.device == "cpu" else "bf16"
    job = {"samples": 2, "tokens": tokens, "steps": options.steps}
    about = {"part": "speed", "device": options.device, "layers": layers, "rows": 2, "tokens_per_row": tokens}
    alone = _time(Row("one", 1, **sizes), one, job, deadline)
    one.close()
    print(json.dumps({**about, "layout": "one device", **alone}), flush=True)
    good = "ms" in alone
    for name, changes in LAYOUTS.items():
        if options.only and name not in options.only:
            continue
        line = _time(Row(name, 2, **sizes, **changes), two, job, deadline)
        if "ms" in line and "ms" in alone:
            off = {what: abs(line[what] / alone[what] - 1) for what in BOUNDS}
            if all(off[what] <= bound for what, bound in BOUNDS.items()):
                speedup = alone["ms"] / line["ms"]
                line |= {"speedup": round(speedup, 3), "efficiency": round(speedup / 2, 3)}
            else:
                line = {**line, "ms": None, "parity": "failed"}
        good &= "speedup" in line
        print(json.dumps({**about, "layout": name, **line}), flush=True)
    return good


def _time(row: Row, pool: RankPool, job: dict[str, Any], deadline: float) -> dict[str, Any]:
    if time.monotonic() > deadline:
        return {"skipped": "no time was left"}
    started = time.perf_counter()
    try:
        line: dict[str, Any] = pool.run(row, "time", **job)
    except RankError as error:
        line = {"error": str(error)[-1500:]}
    return {**line, "seconds": round(time.perf_counter() - started, 1)}
