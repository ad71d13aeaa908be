"""One rank of four: runs a mixture of experts in every layout on its tokens, and saves what it got.

Usage: python expert_cases.py <folder>; the ranks meet through a file in the folder.

Axes: T tokens of all ranks, D hidden, E experts, K experts of each token, F features inside an expert.
"""

import os
import signal
import sys
import traceback
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

MEETINGS = count()
WORLD, EXPERTS, HIDDEN, FFN, SHARED, TOKENS = 4, 8, 12, 6, 10, 48
SEQUENCE = {"tensor": 2, "sequence": True}
LAYOUTS = {
    "data 4": {},
    "expert 2": {"expert": 2},
    "expert 4": {"expert": 4},
    "expert 2, context 2": {"expert": 2, "context": 2},
    "tensor 2, expert tensor 2": SEQUENCE,
    "tensor 2, expert tensor 1": {**SEQUENCE, "expert_tensor": 1},
    "tensor 2, expert 2, expert tensor 1": {**SEQUENCE, "expert": 2, "expert_tensor": 1},
    "tensor 2, expert 2, expert tensor 2": {**SEQUENCE, "expert": 2},
    "tensor 1, expert 2, expert tensor 2": {"expert": 2, "expert_tensor": 2},
}
# Which experts the tokens may ask for, and how many each asks for. With two places, experts 0 to 3 are on the
# first.
CASES: dict[str, tuple[tuple[int, ...], int]] = {
    "every expert": (tuple(range(EXPERTS)), 2),
    "an expert without tokens": ((0, 1, 2, 4, 5, 6, 7), 2),
    "ranks without tokens": ((0, 1, 3), 2),
    "all tokens to one expert": ((5,), 1),
    "all tokens to all experts": (tuple(range(EXPERTS)), EXPERTS),
}


def weights_of_the_block() -> dict[str, torch.Tensor]:
    """Whole weights, float64, the same on every rank; the router reads a token's first E features."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5

    return {
        "router.weight": torch.eye(EXPERTS, HIDDEN, dtype=torch.float64) + 0.02 * drawn(EXPERTS, HIDDEN),
        "experts.linear_fc1.weight": drawn(EXPERTS, 2 * FFN, HIDDEN),
        "experts.linear_fc2.weight": drawn(EXPERTS, HIDDEN, FFN),
        "shared_experts.gate_weight": drawn(1, HIDDEN),
        "shared_experts.linear_fc1.weight": drawn(2 * SHARED, HIDDEN),
        "shared_experts.linear_fc2.weight": drawn(HIDDEN, SHARED),
    }


def tokens_of(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [T, D] that choose only the case's experts, gradient of the output [T, D])."""
    allowed, top_k = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    x_TD = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64) * 0.3
    for token in range(TOKENS):
        order = torch.randperm(len(allowed), generator=generator)[:top_k]
        x_TD[token, [allowed[i] for i in order]] += 4
    return x_TD, torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)


def rows_of(first: int, count: int, size: int) -> torch.Tensor:
    """Rows of a [gate; up] matrix with `size` rows each: `count` of each from `first`."""
    return torch.cat([torch.arange(first, first + count), size + torch.arange(first, first + count)])


def place_of(name: str, groups) -> tuple[torch.Tensor, ...]:
    """Indices, one tensor per axis, of this rank's share of a whole weight."""
    if name.startswith("experts"):
        experts, share = EXPERTS // groups.ep.size(), FFN // groups.expt_tp.size()
        mine = torch.arange(groups.ep.rank() * experts, (groups.ep.rank() + 1) * experts)
        first = groups.expt_tp.rank() * share
        if "fc1" in name:
            return mine, rows_of(first, share, FFN), torch.arange(HIDDEN)
        return mine, torch.arange(HIDDEN), torch.arange(first, first + share)
    if name.startswith("shared_experts.linear"):
        share = SHARED // groups.tp.size()
        first = groups.tp.rank() * share
        if "fc1" in name:
            return rows_of(first, share, SHARED), torch.arange(HIDDEN)
        return torch.arange(HIDDEN), torch.arange(first, first + share)
    return tuple(torch.arange(size) for size in weights_of_the_block()[name].shape)


def make_block(layout: str, top_k: int):
    """(block with this rank's share of the weights, groups)."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from relax_core.device import ParallelConfig
    from relax_core.model.config import Qwen35Config
    from relax_core.model.megatron_config import megatron_config
    from relax_core.model.moe import MixtureOfExperts

    sizes = Qwen35Config(
        vocab_size=8, hidden_size=HIDDEN, ffn_size=FFN, layer_types=("full_attention",), attention_heads=2,
        kv_heads=2, head_dim=4, delta_key_heads=2, delta_value_heads=2, delta_key_dim=4, delta_value_dim=4,
        conv_width=4, norm_eps=1e-6, rope_base=1e4, rotary_dim=2, tied=False, mtp_layers=0,
        experts=EXPERTS, experts_per_token=top_k, shared_ffn_size=SHARED,
    )  # fmt: skip
    config = megatron_config(
        sizes,
        ParallelConfig(**LAYOUTS[layout]),
        dtype=torch.float64,
        recompute="none",
        random_weights=True,
    )
    block = MixtureOfExperts(config)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "ep", "expt_tp"])
    for name, parameter in block.named_parameters():
        share = weights_of_the_block()[name][torch.meshgrid(*place_of(name, groups), indexing="ij")]
        with torch.no_grad():
            parameter.copy_(share)
    return block, groups


def measure(layout: str, case: str) -> dict:
    """Output, gradient of the tokens, and this rank's gradients with the places they belong to."""
    block, groups = make_block(layout, CASES[case][1])
    rank = dist.get_rank()
    x_TD, upstream_TD = (x.chunk(WORLD)[rank] for x in tokens_of(case))
    x_TD = x_TD.clone().requires_grad_()
    out_T1D, _ = block(x_TD.unsqueeze(1))
    out_T1D.backward(upstream_TD.unsqueeze(1))
    gradients = {
        name: (parameter.grad, place_of(name, groups)) for name, parameter in block.named_parameters()
    }
    return {"out": out_T1D.detach().squeeze(1), "dx": x_TD.grad, "gradients": gradients}


def order_of(layout: str) -> list[str]:
    """What a forward pass does, in its order: sends sizes, queues the shared expert, reads the sizes."""
    from relax_core.device.readback import Readback
    from relax_core.model.shared_expert import SharedExpert

    block, _groups = make_block(layout, 2)
    done: list[str] = []

    def noted(name: str, owner: type, method: str) -> AbstractContextManager:
        original = getattr(owner, method)

        def call(*args, **options):
            done.append(name)
            return original(*args, **options)

        return patch.object(owner, method, call)

    with (
        noted("sizes sent", Readback, "__init__"),
        noted("shared expert", SharedExpert, "forward"),
        noted("sizes read", Readback, "read"),
    ):
        block(torch.zeros(TOKENS // WORLD, 1, HIDDEN, dtype=torch.float64))
    return done


def write(layout: str, folder: Path) -> None:
    """A checkpoint of the block in this layout."""
    from megatron.core import dist_checkpointing
    from relax_core.trainer.save_strategy import TorchDistWriter

    if dist.get_rank() == 0:
        (folder / layout).mkdir()
    dist.barrier()
    block, _groups = make_block(layout, 2)
    dist_checkpointing.save(block.sharded_state_dict("mlp."), str(folder / layout), TorchDistWriter())


def read(layout: str, directory: Path) -> bool:
    """Whether a checkpoint gives the block in this layout its own share of the weights."""
    from megatron.core import dist_checkpointing

    block, _groups = make_block(layout, 2)
    wanted = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    for parameter in block.parameters():
        parameter.detach().zero_()
    state = dist_checkpointing.load(block.sharded_state_dict("mlp."), str(directory))
    own = {k.removeprefix("mlp."): v for k, v in state.items() if not k.endswith("_extra_state")}
    block.load_state_dict(own)
    return all(torch.equal(wanted[name], parameter) for name, parameter in block.named_parameters())


def start(layout: str) -> None:
    """Megatron's groups of a layout, in place of those there are."""
    from megatron.core import parallel_state
    from relax_core.device import ParallelConfig, get_device, seed_all

    sizes = ParallelConfig(**LAYOUTS[layout])
    parallel_state.destroy_model_parallel()
    # Every gloo group has threads of its own: groups that are only forgotten pile up to thousands.
    # A rank that leaves before the others have all their connections breaks theirs.
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    meet(rank)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
    )
    seed_all(get_device("cpu"), 1)


def main(folder: Path) -> int:
    """Imports once, then becomes four ranks; 1 as soon as one fails: the others would wait for it."""
    from relax_core.device import get_device
    from relax_core.upstream import install_corrections

    torch.set_num_threads(1)
    get_device("cpu").init(0)
    install_corrections()
    import relax_core.model.moe  # noqa: F401

    children = set()
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            try:
                run(rank, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.add(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def meet(rank: int) -> None:
    """Starts the group of all ranks, each time through a file of its own."""
    store = Path(sys.argv[1]) / f"store{next(MEETINGS)}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)


def run(rank: int, folder: Path) -> None:
    meet(rank)
    results: dict = {}
    written: list[str] = []
    for layout in LAYOUTS:
        start(layout)
        for case in CASES:
            results[layout, case] = [measure(layout, case) for _ in range(2)]
        results[layout, "order"] = order_of(layout)
        for other in (*written[-1:], *written[-4:-3], *written[:1]):
            results["read", other, layout] = read(layout, folder / other)
        write(layout, folder)
        written.append(layout)
    torch.save(results, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
