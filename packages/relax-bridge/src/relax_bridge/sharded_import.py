"""Import of one rank: reads the stored rows that the rank owns, and nothing else."""

from collections.abc import Callable, Iterable, Iterator
from math import prod

import torch
from torch import Tensor

from relax_bridge.checkpoint import Checkpoint
from relax_bridge.errors import BridgeError
from relax_bridge.layout import Layout
from relax_bridge.model_map import ModelMap
from relax_bridge.placement import Piece, Placement, Shard
from relax_bridge.table import Entry

# What changes dtype or device passes through memory of this size.
_STAGING_BYTES = 32 * 2**20


def import_shards(
    table: ModelMap,
    checkpoint: Checkpoint,
    *,
    layout: Layout = Layout(),  # noqa: B008 - frozen
    rank: int = 0,
    into: Callable[[Shard], Tensor] | None = None,
) -> Iterator[tuple[Shard, Tensor]]:
    """The tensors that a rank owns, in the order of the table; everything is checked before the first is
    read.

    Args:
        table: the model's map.
        checkpoint: where the weights are stored.
        layout: the ranks.
        rank: one of them.
        into: gives the tensor to fill for each shard (a parameter, say: of any dtype and device); by default
            each is a new CPU tensor in its stored dtype.

    Yields:
        (shard, tensor); `shard.chunk` and `shard.name` say where it belongs.

    Raises:
        MtpMismatchError, CoverageError: the checkpoint is not exactly this model (see `ModelMap.check`).
        BridgeError: the layout does not fit the model, or `into` gives a tensor of another shape.
    """
    table.check(checkpoint)
    shards = Placement(table, layout).shards(rank)
    return ((shard, read_shard(checkpoint, shard, into and into(shard))) for shard in shards)


@torch.no_grad()
def read_shard(checkpoint: Checkpoint, shard: Shard, out: Tensor | None = None) -> Tensor:
    """Reads one shard, into `out` if given.

    Raises:
        BridgeError: `out` has another shape.
    """
    dtype = checkpoint.dtype(shard.entry.hf[0])
    if out is None:
        out = torch.empty(shard.shape, dtype=dtype)
    elif tuple(out.shape) != shard.shape:
        raise BridgeError(
            f"{shard.name} of the model is {list(out.shape)}; its share of {shard.entry.megatron} in this "
            f"layout is {list(shard.shape)}"
        )
    axis, pieces = shard.cutting.axis, shard.cutting.pieces
    read_pieces(checkpoint, shard.entry, axis, pieces, out)
    filled = sum(piece.size for piece in pieces)
    if filled < out.shape[axis]:
        out.narrow(axis, filled, out.shape[axis] - filled).zero_()
    return out


@torch.no_grad()
def read_pieces(
    checkpoint: Checkpoint, entry: Entry, axis: int, pieces: Iterable[Piece], out: Tensor
) -> None:
    """Reads stored rows (columns for axis 1) of an entry's tensors to their places in `out`.

    `out` may have any dtype and device; what needs a conversion passes through bounded memory.
    """
    dtype, stack = checkpoint.dtype(entry.hf[0]), entry.stack_index
    direct = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
    for part, start, size, at in pieces:
        window, name = out.narrow(axis, at, size), entry.hf[part]
        if direct:
            _read(checkpoint, window, name, axis, start, 0, stack)
            continue
        for rows, block in _blocks(window, itemsize=torch.empty(0, dtype=dtype).element_size()):
            staged = torch.empty(block.shape, dtype=dtype)
            _read(checkpoint, staged, name, axis, start, rows, stack)
            block.copy_(staged)


def _read(
    checkpoint: Checkpoint, out: Tensor, name: str, axis: int, start: int, rows: int, stack: int | None
) -> None:
    """Fills `out`: rows from `start + rows` on, or columns from `start` of the rows from `rows` on."""
    if axis:
        checkpoint.read_into(out, name, row=rows, column=start, stack=stack)
    else:
        checkpoint.read_into(out, name, row=start + rows, stack=stack)


def _blocks(window: Tensor, *, itemsize: int) -> Iterator[tuple[int, Tensor]]:
    """The rows of a tensor in blocks of bounded size, each with its first row."""
    height = max(1, _STAGING_BYTES // max(1, prod(window.shape[1:]) * itemsize))
    for row in range(0, window.shape[0], height):
        yield row, window[row : row + height]
