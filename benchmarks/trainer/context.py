"""What context parallelism adds to a layer, for 1, 16 and 256 samples in one row: JSON lines.

    OMP_NUM_THREADS=1 python benchmarks/trainer/context.py [--tokens 8192] [--rounds 9]

Two gloo ranks share a row. The operators' own work depends on the samples on any number of ranks (attention
does less over short samples), so that they are replaced by products of one cost per token: what is left is
what the ranks do for one another, exchange, order and merging, forward and backward. `ms` is one layer's,
processor time of rank 0, the smallest of the rounds; `ratio` is over that of the first row. `collectives` are
those of one layer, forward and backward, counted. `plan_ms` is the host's once per micro-batch and way: the
tables of both layers, for all layers of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from relax_core.device import get_device
from relax_core.packing import PackedLayout

SAMPLES = (1, 16, 256)
HEADS, KV_HEADS, WIDTH, TAPS = 8, 2, 32, 4


def attention(q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, **_: Any) -> torch.Tensor:
    """Stands in for attention: one product a token, reaching every input's gradient."""
    return q_THD * (k_SGD[:1].mean() + v_SGD[:1].mean())


def convolution(x_TC: torch.Tensor, weight_CW: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    return x_TC * weight_CW[:, 0], None


def rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    *,
    cu_seqlens: Any,
    output_final_state: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    per_head = v_TUV.shape[1] // q_THK.shape[1]
    mixed = v_TUV * (g_TU + beta_TU).unsqueeze(-1)
    mixed = mixed * (q_THK[..., :1] + k_THK[..., :1]).repeat_interleave(per_head, 1)
    state = k_THK[-1].repeat_interleave(per_head, 0).unsqueeze(-1) * v_TUV[-1].unsqueeze(1)
    return mixed, state.unsqueeze(0) if output_final_state else None


def layer(way: tuple[str, str], layout: PackedLayout, group: Any) -> Callable[[], None]:
    """Forward and backward of one mixer's sharing, on this rank's tokens."""
    from relax_core.model.context import DeltaHeads, context_attention, context_delta

    mixer, how = way
    tokens = layout.local_total

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).requires_grad_()

    if mixer == "attention":
        q, k, v = (drawn(tokens, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
        return lambda: context_attention(q, k, v, layout, way=how, group=group).sum().backward()
    channels = 3 * HEADS * WIDTH
    heads = DeltaHeads(HEADS, WIDTH, HEADS, WIDTH, drawn(channels, TAPS), drawn(HEADS), drawn(HEADS))
    qkv, b, a = drawn(tokens, channels), drawn(tokens, HEADS), drawn(tokens, HEADS)
    return lambda: context_delta(qkv, b, a, heads, layout, way=how, group=group).sum().backward()


WAYS = (("attention", "gather"), ("attention", "heads"), ("delta", "heads"), ("delta", "state"))


def count(work: Callable[[], None]) -> int:
    """Collectives of one call."""
    with torch.profiler.profile() as recorded:
        work()
    names = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_")
    return sum(event.count for event in recorded.key_averages() if event.key in names)


def main_rank(rank: int, folder: str, tokens: int, rounds: int) -> None:
    torch.set_num_threads(1)
    get_device("cpu").prepare()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    import relax_core.model.context.attention as attention_module
    import relax_core.model.context.delta as delta_module
    import relax_core.model.context.delta_state as state_module

    mock.patch.object(attention_module, "attention", attention).start()
    mock.patch.object(delta_module, "causal_conv1d", convolution).start()
    mock.patch.object(delta_module, "gated_delta_rule", rule).start()
    mock.patch.object(state_module, "gated_delta_rule", rule).start()
    for way in WAYS:
        layer(way, PackedLayout.build([tokens], context_size=2, context_rank=rank), dist.group.WORLD)()
        first = 0.0
        for samples in SAMPLES:
            # Not a multiple of the chunks: samples cross every border, the first one by a lot.
            lengths = [tokens // samples] * samples
            lengths[0] -= 3
            lengths[-1] += 3
            start = time.process_time()
            layout = PackedLayout.build(lengths, context_size=2, context_rank=rank)
            work = layer(way, layout, dist.group.WORLD)
            work()
            planned = time.process_time() - start
            collectives = count(work)
            best = float("inf")
            for _ in range(rounds):
                dist.barrier()
                start = time.process_time()
                work()
                best = min(best, time.process_time() - start)
            first = first or best
            line = {
                "mixer": way[0], "way": way[1], "tokens": tokens, "samples": samples,
                "collectives": collectives, "ms": round(1e3 * best, 2), "ratio": round(best / first, 3),
                "plan_ms": round(1e3 * max(0.0, planned - best), 2),
            }  # fmt: skip
            if rank == 0:
                print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        main_rank(options.rank, options.folder, options.tokens, options.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--tokens", str(options.tokens), "--rounds", str(options.rounds)]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), "--folder", folder], env=os.environ.copy())
            for rank in range(2)
        ]
        return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
