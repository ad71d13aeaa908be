"""Small configs and random checkpoints, made without transformers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_bridge import Checkpoint, Layout, ModelMap, export_buckets, import_shards, model_map
from safetensors.torch import save_file
from torch import Tensor

TINY: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
    "num_experts": 3,
}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """bfloat16 noise; float32 for A_log and dt_bias, as released checkpoints have it."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=gen)
        out[name] = noise if name.endswith(("A_log", "dt_bias")) else noise.bfloat16()
    return out


def write_plain(path: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    """A checkpoint of one file, by safetensors' own writer."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint.open(path)


class MemoryCheckpoint(Checkpoint):
    """Tensors in memory behind the reading interface; `read` counts the elements asked for."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.path = Path("memory")
        self.read = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def stored_dtype(self, name: str) -> str:
        return str(self.tensors[name].dtype)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def slice(self, name: str, *index: slice) -> Tensor:
        return self.tensors[name][index]

    def read_into(
        self, out: Tensor, name: str, *, row: int = 0, column: int | None = None, stack: int | None = None
    ) -> None:
        whole = self.tensors[name] if stack is None else self.tensors[name][stack]
        block = whole[row : row + out.shape[0]]
        self.read += out.numel()
        out.copy_(block if column is None else block[:, column : column + out.shape[1]])


class Rehearsal:
    """An exchange among ranks that run one after the other in this process.

    Planning makes what a rank sends independent of what it gets, so each rank first runs for what it sends
    (`sending`), then with all of it at hand (`receiving`).
    """

    def __init__(self, ranks: int, to: int | None) -> None:
        self.to = to
        self.sent: list[list[Tensor]] = [[] for _ in range(ranks)]

    def as_rank(self, rank: int, *, sending: bool) -> "Rehearsal.Rank":
        return self.Rank(self, rank, sending)

    class Rank:
        def __init__(self, all_: "Rehearsal", rank: int, sending: bool) -> None:
            self.all, self.rank, self.sending, self.step = all_, rank, sending, -1

        def receives(self, rank: int) -> bool:
            return self.all.to is None or rank == self.all.to

        def start(self, mine: Tensor, sizes: Any) -> Any:
            assert mine.numel() == sizes[self.rank], "every rank must know what the others send"
            self.step += 1
            if self.sending:
                self.all.sent[self.rank].append(mine)
                return lambda: None
            got = [sent[self.step] for sent in self.all.sent]
            assert [x.numel() for x in got] == list(sizes)
            return lambda: got if self.receives(self.rank) else None


def export_from_ranks(
    table: ModelMap,
    held: list[list[dict[str, Tensor]]],
    layout: Layout,
    *,
    to: int | None = 0,
    **options: Any,
) -> list[list[dict[str, Tensor]]]:
    """The buckets that each rank of a layout yields; `held` is each rank's chunks."""
    every = Rehearsal(layout.world_size, to)
    found: list[list[dict[str, Tensor]]] = []
    for sending in (True, False):
        found = [
            [
                dict(bucket)
                for bucket in export_buckets(
                    table,
                    chunks,
                    layout=layout,
                    rank=rank,
                    exchange=every.as_rank(rank, sending=sending),
                    **options,
                )
            ]
            for rank, chunks in enumerate(held)
        ]
    return found


@pytest.fixture(scope="session")
def in_memory() -> type[MemoryCheckpoint]:
    """A checkpoint of tensors in memory."""
    return MemoryCheckpoint


@pytest.fixture(scope="session")
def export_all() -> Callable[..., list[list[dict[str, Tensor]]]]:
    """`export_from_ranks`."""
    return export_from_ranks


@pytest.fixture(scope="session")
def import_all() -> Callable[..., list[list[dict[str, Tensor]]]]:
    """Every rank's tensors by local name, one mapping a chunk."""

    def load(table: ModelMap, checkpoint: Checkpoint, layout: Layout) -> list[list[dict[str, Tensor]]]:
        ranks: list[list[dict[str, Tensor]]] = []
        for rank in range(layout.world_size):
            chunks: list[dict[str, Tensor]] = [{} for _ in range(layout.pipeline_chunks)]
            for shard, tensor in import_shards(table, checkpoint, layout=layout, rank=rank):
                assert shard.name not in chunks[shard.chunk]
                chunks[shard.chunk][shard.name] = tensor
            ranks.append(chunks)
        return ranks

    return load


@pytest.fixture
def tiny_config() -> Callable[..., dict[str, Any]]:
    """A text-only dense config (delta net, attention, delta net, attention; one MTP layer) with changes."""
    return lambda **changes: TINY | changes


@pytest.fixture
def moe_config() -> Callable[..., dict[str, Any]]:
    """The same with experts."""
    return lambda **changes: TINY | MOE | changes


@pytest.fixture(scope="session")
def noise() -> Callable[..., dict[str, Tensor]]:
    """`random_tensors`."""
    return random_tensors


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Writes and opens a checkpoint of a config: make(config, name="x", edit=function of the tensors)."""

    def build(
        config: dict[str, Any], *, name: str = "source", edit: Any = None, names: Any = None
    ) -> Checkpoint:
        tensors = random_tensors(model_map(config, names=names).hf_shapes())
        if edit is not None:
            edit(tensors)
        return write_plain(tmp_path / name, config, tensors)

    return build


@pytest.fixture
def tiny(make: Callable[..., Checkpoint]) -> Checkpoint:
    """An opened random checkpoint of the dense config."""
    return make(TINY)
