"""AdamW on many tensors at once: bit for bit what it does to each by itself."""

import pytest
import relax_kernels as rk
import torch
from relax_kernels.testing import NotServed, Target

OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.7}
# Whole and part tiles, nothing, and what follows it, so that a program must find its shard.
SIZES = (1, 1024, 0, 5000, 4096, 3, 0, 20_000)


def shards(target: Target, *, split: bool, states: torch.dtype) -> list[rk.AdamShard]:
    found = []
    for number, size in enumerate(SIZES):
        start = target.normal(size, seed=number).detach()
        weight, rest = rk.split_float32(start) if split else (start.clone(), None)
        grad = target.normal(size, seed=50 + number, dtype=states).detach()
        mean, square = torch.zeros_like(grad), torch.zeros_like(grad)
        found.append(
            rk.AdamShard(weight, grad, mean, square, rest, seed=7 * number, first=2**32 - 9 + number)
        )
    return found


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_many_tensors_get_the_bits_of_each_alone(target: Target, split: bool, states: torch.dtype) -> None:
    together, alone = (shards(target, split=split, states=states) for _ in range(2))
    group = rk.AdamShards(together)
    try:
        for step in (1, 2, 16):
            target.run("adamw_steps", group, step=step, **OPTIONS)
    except NotServed as reason:
        pytest.skip(str(reason))
    for step in (1, 2, 16):
        for one in alone:
            # The reference, so that a fault in finding the tensors cannot hide in both.
            rk.adamw_step(
                *one[:5], step=step, seed=one.seed, first=one.first, backend=target.backend, **OPTIONS
            )
    for number, (a, b) in enumerate(zip(together, alone, strict=True)):
        for x, y in zip(a.tensors, b.tensors, strict=True):
            assert torch.equal(x, y), f"shard {number} of {SIZES[number]} elements differs"
    moved = [bool((a.mean_N != 0).any()) for a in together]
    assert moved == [size > 0 for size in SIZES]


def test_shards_that_lie_anywhere_are_served(target: Target) -> None:
    """Addresses that are no multiples of 16 bytes."""
    whole, parts = (shards(target, split=True, states=torch.bfloat16)[3] for _ in range(2))
    cut = [slice(0, 1), slice(1, 778), slice(778, 5000)]
    pieces = [
        rk.AdamShard(*(x[piece] for x in parts.tensors), seed=parts.seed, first=parts.first + piece.start)
        for piece in cut
    ]
    try:
        target.run("adamw_steps", rk.AdamShards(pieces), step=3, **OPTIONS)
    except NotServed as reason:
        pytest.skip(str(reason))
    target.run("adamw_step", *whole[:5], step=3, seed=whole.seed, first=whole.first, **OPTIONS)
    for x, y in zip(whole.tensors, parts.tensors, strict=True):
        assert torch.equal(x, y)


def test_what_does_not_go_together_is_refused() -> None:
    x, half, rest = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16)
    plain = rk.AdamShard(x, x, x, x)
    with pytest.raises(rk.InvalidInput, match="AdamShards: at least one shard is needed"):
        rk.AdamShards([])
    with pytest.raises(rk.InvalidInput, match=r"shard 1: its .* bfloat16, float32.* shard 0 are"):
        rk.AdamShards([plain, rk.AdamShard(half, x, x, x, rest)])
    with pytest.raises(rk.InvalidInput, match="shard 1: grad_N has shape"):
        rk.AdamShards([plain, rk.AdamShard(x, torch.zeros(5), x, x)])
    with pytest.raises(rk.InvalidInput, match="shards must be an AdamShards"):
        rk.adamw_steps([plain], step=1, **OPTIONS)
    with pytest.raises(rk.InvalidInput, match="lr must not be negative"):
        rk.adamw_steps(rk.AdamShards([plain]), step=1, **{**OPTIONS, "lr": -1.0})
