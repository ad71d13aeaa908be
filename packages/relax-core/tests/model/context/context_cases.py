"""One rank of four: runs attention and delta net on 1, 2 and 4 context-parallel ranks, and saves what it got.

Usage: python context_cases.py <rank> <folder>; the ranks meet through a file in the folder.

Axes: T row positions, H query heads, G key/value heads, D features of a head, C channels, U value heads.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from relax_core.device import get_device
from relax_core.packing import PackedLayout
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = (1, 2, 4)
WORLD = max(SIZES)


def lengths_of_every_case() -> dict[str, tuple[int, ...]]:
    """Samples by case. Every row is padded to 8 or 16 positions and more, so chunks are 1 to 12 tokens."""
    generator = torch.Generator().manual_seed(3)
    cases = {
        "ragged": (13, 1, 7, 19, 5),
        "one long sample": (64,),
        "one token": (1,),
        "ends at chunk edges of 2 and 4 ranks": (8, 4, 4, 16),
        "one-token samples at edges": (7, 1, 1, 6, 1, 1, 14, 1),
        "samples of one token": (1,) * 17,
        "padding larger than the sample": (3,),
        "a sample over three of four ranks": (2, 25, 5),
    }
    for border in range(1, 16):
        cases[f"border at {border}"] = (border, 16 - border)
    for number in range(4):
        count = int(torch.randint(1, 9, (), generator=generator))
        cases[f"random {number}"] = tuple(torch.randint(1, 14, (count,), generator=generator).tolist())
    return cases


def drawn(name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The same float64 tensors on every rank."""
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()
    }


class Watch(TorchDispatchMode):
    """Counts collectives, and calls whose result the host has to wait for."""

    def __init__(self):
        super().__init__()
        self.collectives, self.waits = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith("c10d."):
            self.collectives.append(name.split(".")[1])
        if any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique")):
            self.waits.append(name)
        return function(*args, **(kwargs or {}))


CHANGED = 2
"""The sample of the first case that `leaks` changes."""


def differentiate(layout, rows, weights, function):
    """Output and gradients of `function` for this rank's part of `rows`, and of the whole `weights`."""
    upstream = rows.pop("upstream")
    if layout.changed:
        mask_T = layout.sample_ids_T == CHANGED
        rows = {key: x + mask_T.view(-1, *[1] * (x.dim() - 1)) for key, x in rows.items()}
    leaves = {key: layout.local(x).clone().requires_grad_() for key, x in rows.items()}
    leaves |= {key: x.clone().requires_grad_() for key, x in weights.items()}
    out = function(**leaves)
    out.backward(layout.local(upstream))
    return {"out": out.detach(), **{f"d{key}": leaf.grad for key, leaf in leaves.items()}}


def attention_case(name, layout, way, group, kv_heads=2):
    from relax_core.model.context import context_attention

    total = layout.padded_total
    shapes = {
        "q": (total, 8, 6),
        "k": (total, kv_heads, 6),
        "v": (total, kv_heads, 6),
        "upstream": (total, 8, 6),
    }
    return differentiate(
        layout,
        drawn(name, shapes),
        {},
        lambda q, k, v: context_attention(q, k, v, layout, way=way, group=group),
    )


def delta_case(name, layout, way, group, value_dim=4):
    from relax_core.model.context import DeltaHeads, context_delta

    total, keys, values = layout.padded_total, 4, 8
    channels = 2 * keys * 6 + values * value_dim
    shapes = {"qkv": (total, channels), "b": (total, values), "a": (total, values)}
    shapes["upstream"] = (total, values, value_dim)
    weights = drawn(name, {"conv": (channels, 4), "a_log": (values,), "dt_bias": (values,)})
    weights["a_log"] -= 2  # a slow decay, so that states reach far

    def run(qkv, b, a, conv, a_log, dt_bias):
        heads = DeltaHeads(keys, 6, values, value_dim, conv, a_log, dt_bias)
        return context_delta(qkv, b, a, heads, layout, way=way, group=group)

    return differentiate(layout, drawn(name, shapes), weights, run)


KINDS = {
    "attention gather": lambda *args: attention_case(*args[:2], "gather", args[2]),
    "attention heads": lambda *args: attention_case(*args[:2], "heads", args[2]),
    "attention heads, 4 key heads": lambda *args: attention_case(*args[:2], "heads", args[2], 4),
    "delta heads": lambda *args: delta_case(*args[:2], "heads", args[2]),
    "delta state": lambda *args: delta_case(*args[:2], "state", args[2]),
    "delta state, wide values": lambda *args: delta_case(*args[:2], "state", args[2], 9),
}


def kinds_of(name: str) -> list[str]:
    """The kinds that a case is run for: ends of samples only matter where ranks hold pieces."""
    return [kind for kind in KINDS if "border" not in name or kind in ("attention gather", "delta state")]


WATCHED = ((64,), (3, 50, 11), (5,) * 11 + (9,))


def watched(run, lengths, size, rank, group):
    """What a second layer on the same layout does: collectives, waits, tables made."""
    layout = PackedLayout.build(lengths, context_size=size, context_rank=rank)
    layout.changed = False
    run("watched", layout, group)
    before = len(layout._tables)
    with Watch() as watch:
        run("watched", layout, group)
    return sorted(watch.collectives), watch.waits, len(layout._tables) - before


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    get_device("cpu").prepare()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        for name, lengths in lengths_of_every_case().items():
            # The same row whatever the ranks.
            layout = PackedLayout.build(
                lengths, pad_to_multiple=2 * WORLD, context_size=size, context_rank=rank
            )
            layout.changed = False
            for kind in kinds_of(name):
                results[kind, name, size] = KINDS[kind](name, layout, group)
        for kind, run in KINDS.items():
            results["watched", kind, size] = [watched(run, lengths, size, rank, group) for lengths in WATCHED]
            name, lengths = next(iter(lengths_of_every_case().items()))
            layout = PackedLayout.build(
                lengths, pad_to_multiple=2 * WORLD, context_size=size, context_rank=rank
            )
            layout.changed = True
            results["changed", kind, size] = run(name, layout, group)
    torch.save(results, folder / f"rank{rank}.pt")
    # A rank that leaves early breaks connections that others still make.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), Path(sys.argv[1]))
