"""Export from the ranks of a layout: buckets of whole Hugging Face tensors, or a rank's own share of each.

Whole tensors are put together component by component: every rank gives the stored rows that it is the first
to hold, and each block goes to its own place, so no order of shards can scramble a fused tensor. While the
blocks of one step are put in place those of the next are on their way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from relax_bridge.checkpoint import Checkpoint
from relax_bridge.errors import BridgeError, CoverageError, Problems
from relax_bridge.exchange import Exchange, NoExchange, Received
from relax_bridge.export_plan import Move, Step, Target, steps, targets
from relax_bridge.layout import Layout
from relax_bridge.model_map import ModelMap
from relax_bridge.partition import GroupedSplit, Range
from relax_bridge.placement import Placement, Shard
from relax_bridge.transforms import Shape

Parameters = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]


def export_buckets(
    table: ModelMap,
    parameters: Parameters,
    *,
    bucket_bytes: int,
    layout: Layout = Layout(),  # noqa: B008 - frozen
    rank: int = 0,
    exchange: Exchange | None = None,
    like: Checkpoint | None = None,
    dtype_of: Callable[[str], torch.dtype] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Whole Hugging Face tensors in buckets, in the order of the table; every rank must iterate to the end.

    A rank that the exchange sends nothing to takes part and yields nothing. A bucket is emptied when the next
    one is asked for; its tensors may share memory with the parameters. Beside the parameters a receiving rank
    holds one bucket and two exchanges of a third of one.

    Args:
        table: the model's map.
        parameters: the rank's tensors: one mapping by their names in the whole model (an embedding that the
            last stage repeats under the embedding's name), or a sequence of mappings by their local names,
            one per pipeline chunk.
        bucket_bytes: the size of a bucket at most; a larger tensor has one to itself.
        layout: the ranks.
        rank: this one.
        exchange: moves bytes between the ranks; may be left out for one rank.
        like: the source checkpoint: each tensor is cast to its source's dtype, and the tensors that the
            trainer does not hold (a vision tower) follow at the end.
        dtype_of: the dtype of a Hugging Face tensor, in place of `like`'s. One of the two is needed with more
            than one rank, as every rank must know the dtypes of what others hold.

    Raises:
        CoverageError: names each parameter that is missing, extra or mis-shaped on this rank.
        BridgeError: more than one rank and no exchange, or no dtypes.
    """
    placement = Placement(table, layout)
    held = _held(placement.shards(rank), parameters, rank)
    if layout.world_size > 1 and exchange is None:
        raise BridgeError(
            f"a layout of {layout.world_size} ranks needs an exchange, for instance ProcessGroupExchange"
        )
    if dtype_of is None:
        dtype_of = _dtypes(table, held, layout, like)
    return _stream(placement, rank, held, exchange or NoExchange(), bucket_bytes, dtype_of, like)


class HfShard(NamedTuple):
    """A rank's share of a Hugging Face tensor.

    Attributes:
        name: the tensor.
        tensor: the share; may share memory with the parameters.
        axis: the axis along which it was cut.
        ranges: where its rows (or columns) lie along that axis of the whole, in order.
        shape: of the whole.
        experts: which of the whole's experts it has, where one tensor holds all of them along its first axis.
    """

    name: str
    tensor: Tensor
    axis: int
    ranges: tuple[Range, ...]
    shape: Shape
    experts: Range | None


def export_shards(
    table: ModelMap, parameters: Parameters, *, layout: Layout, rank: int, engine: Layout
) -> Iterator[HfShard]:
    """This rank's share of every Hugging Face tensor it holds, without any exchange.

    For a sampling engine that cuts tensors over as many ranks as the trainer does: its rank takes the share
    as it is. Heads are cut whole, fused projections part by part, and the padding of the vocabulary is taken
    off. With more ranks than key/value heads the trainer's ranks share a head, of which an engine's rank
    wants the whole: that needs `export_buckets`.

    Raises:
        CoverageError: names each parameter that is missing, extra or mis-shaped on this rank.
        BridgeError: the engine cuts tensors otherwise; the numbers of both are named.
    """
    ours = (layout.tensor, layout.expert, layout.expert_size)
    theirs = (engine.tensor, engine.expert, engine.expert_size)
    moe = any("e" in row.at for row in table.rows)
    if ours[: 3 if moe else 1] != theirs[: 3 if moe else 1]:
        raise BridgeError(
            f"trainer and engine cut tensors differently: (tensor, expert, expert_tensor) is {ours} and "
            f"{theirs}; use export_buckets, which gathers"
        )
    for row in table.rows:
        if isinstance(row.partition, GroupedSplit) and layout.tensor > row.partition.groups:
            raise BridgeError(
                f"{layout.tensor} tensor-parallel ranks share the {row.partition.groups} key/value heads, of "
                "which an engine's rank wants a whole one; use export_buckets, which gathers"
            )
    shards = Placement(table, layout).shards(rank)
    return _shares([shard for shard in shards if not shard.repeated], _held(shards, parameters, rank))


def _shares(shards: Sequence[Shard], held: Mapping[str, Tensor]) -> Iterator[HfShard]:
    for _, group in groupby(shards, key=lambda s: s.entry.hf if s.entry.row.stacked else s.entry.megatron):
        same = list(group)
        entry, cutting = same[0].entry, same[0].cutting
        first = entry.stack_index
        for part, (name, shape) in enumerate(zip(entry.hf, entry.hf_shapes, strict=True)):
            pieces = sorted(piece for piece in cutting.pieces if piece.part == part)
            shares = []
            for shard in same:
                local = held[shard.entry.megatron]
                rows = [local.narrow(cutting.axis, piece.at, piece.size) for piece in pieces]
                shares.append(rows[0] if len(rows) == 1 else torch.cat(rows, dim=cutting.axis))
            ranges = tuple(Range(piece.start, piece.size) for piece in pieces)
            if first is None:
                yield HfShard(name, shares[0], cutting.axis, ranges, shape, None)
            else:
                experts = Range(first, len(same))
                yield HfShard(name, torch.stack(shares), cutting.axis + 1, ranges, shape, experts)


@torch.no_grad()
def _stream(
    placement: Placement,
    rank: int,
    held: Mapping[str, Tensor],
    exchange: Exchange,
    bucket_bytes: int,
    dtype_of: Callable[[str], torch.dtype],
    like: Checkpoint | None,
) -> Iterator[dict[str, Tensor]]:
    world = range(placement.layout.world_size)
    receivers = {other for other in world if exchange.receives(other)}

    def travels(sender: int) -> bool:
        return bool(receivers - {sender})

    def start(step: Step) -> Callable[[], Received]:
        sizes = [0] * len(world)
        for move in step.moves:
            sizes[move.rank] += move.block.size if travels(move.rank) else 0
        mine = [_bytes(held, move) for move in step.moves if move.rank == rank and travels(rank)]
        nothing = torch.empty(0, dtype=torch.uint8, device=_device(held))
        return exchange.start(torch.cat(mine) if mine else nothing, sizes)

    plan = steps(placement, targets(placement.table, dtype_of), bucket_bytes=bucket_bytes, travels=travels)
    bucket: dict[str, Tensor] = {}
    step: Step | None = next(plan)
    assert step is not None
    arrived = start(step)
    while step is not None:
        following = next(plan, None)
        arriving = start(following) if following is not None else arrived
        received = arrived()
        if received is not None:
            _place(placement, step, received, rank, held, bucket)
            del received
            if step.closes:
                yield bucket
                bucket.clear()
                bucket = {}
        step, arrived = following, arriving
    if like is not None and rank in receivers:
        yield from _untouched(placement.table, like, bucket_bytes)


def _bytes(held: Mapping[str, Tensor], move: Move) -> Tensor:
    source, _, _, dtype, nbytes, size = move.block
    block = held[move.megatron][source].to(dtype).contiguous().reshape(-1).view(torch.uint8)
    padding = size - nbytes
    return torch.cat([block, block.new_zeros(padding)]) if padding else block


def _place(
    placement: Placement,
    step: Step,
    received: Sequence[Tensor],
    rank: int,
    held: Mapping[str, Tensor],
    bucket: dict[str, Tensor],
) -> None:
    """Puts a step's blocks where they belong; what this rank has whole is taken as it is."""
    for target in step.opens:
        own = _whole(placement, target, rank, held)
        room = torch.empty(target.shape, dtype=target.dtype, device=_device(held)) if own is None else own
        bucket[target.name] = room
    at = [0] * placement.layout.world_size
    for move in step.moves:
        there = bucket[move.name]
        if move.rank == rank:
            here = held[move.megatron]
            if there.untyped_storage().data_ptr() != here.untyped_storage().data_ptr():
                there[move.target].copy_(here[move.block.source])
            continue
        rows = move.block
        arrived = received[move.rank][at[move.rank] : at[move.rank] + rows.nbytes]
        there[move.target].copy_(arrived.view(rows.dtype).view(rows.shape))
        at[move.rank] += rows.size


def _whole(placement: Placement, target: Target, rank: int, held: Mapping[str, Tensor]) -> Tensor | None:
    """A view of the rank's own tensor, where that holds all rows of a Hugging Face tensor, one after the
    other."""
    (entry, part), *others = target.origins
    sources = placement.sources(entry)
    if others or entry.row.stacked or len(sources) > 1 or sources[0][0] != rank:
        return None
    cutting = sources[0][1]
    pieces = [piece for piece in cutting.sends if piece.part == part]
    local = held[entry.megatron]
    if len(pieces) > 1 or local.dtype != target.dtype:
        return None
    return local.narrow(cutting.axis, pieces[0].at, pieces[0].size)


def _untouched(table: ModelMap, like: Checkpoint, bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """What the trainer does not hold, from the source."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name in like.names:
        if table.passes_through(name):
            if bucket and size + like.nbytes(name) > bucket_bytes:
                yield bucket
                bucket.clear()
                bucket = {}
                size = 0
            bucket[name] = like.tensor(name)
            size += like.nbytes(name)
    if bucket:
        yield bucket


def _held(shards: Sequence[Shard], parameters: Parameters, rank: int) -> dict[str, Tensor]:
    """Name in the whole model -> the rank's tensor, checked against the plan."""
    whole = isinstance(parameters, Mapping)
    chunks = [parameters] if isinstance(parameters, Mapping) else list(parameters)
    expected = {(0, shard.entry.megatron) if whole else (shard.chunk, shard.name): shard for shard in shards}
    given = {(chunk, name): x.detach() for chunk, named in enumerate(chunks) for name, x in named.items()}
    shown = (lambda chunk, name: f"chunk {chunk}: {name}") if len(chunks) > 1 else (lambda chunk, name: name)
    problems = Problems(
        missing=tuple(shown(*key) for key in expected if key not in given),
        extra=tuple(shown(*key) for key in given if key not in expected),
        mis_shaped=tuple(
            f"{shown(*key)}: {list(given[key].shape)}, this layout says {list(shard.shape)}"
            for key, shard in expected.items()
            if key in given and tuple(given[key].shape) != shard.shape
        ),
    )
    if problems:
        raise CoverageError(f"the tensors of rank {rank} do not fit the table", problems)
    return {shard.entry.megatron: given[key] for key, shard in expected.items()}


def _dtypes(
    table: ModelMap, held: Mapping[str, Tensor], layout: Layout, like: Checkpoint | None
) -> Callable[[str], torch.dtype]:
    if like is not None:
        source = like
        return lambda name: source.dtype(name) or torch.get_default_dtype()
    if layout.world_size > 1:
        raise BridgeError(
            "an export from several ranks needs like=... or dtype_of=..., for the dtypes of all tensors"
        )
    own = {name: held[entry.megatron].dtype for entry in table.entries for name in entry.hf}
    return own.__getitem__


def _device(held: Mapping[str, Tensor]) -> torch.device:
    return next((x.device for x in held.values()), torch.device("cpu"))
