"""Which tensors a rank owns, under which local names, and which stored rows each of them is made of.

Pure: everything follows from the table and the layout, never from a model that exists on some ranks only. So
every rank can tell what any other holds.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from relax_bridge.errors import BridgeError
from relax_bridge.layout import Layout, Position
from relax_bridge.model_map import TRUNK, ModelMap
from relax_bridge.partition import Cut, Partition, Split
from relax_bridge.table import Entry, Row
from relax_bridge.transforms import Run, Shape

_EMBEDDING = "embedding."
_HEAD = "output_layer.weight"
_TOWER = "visual."
_LAST_STAGE = ("decoder.final_layernorm.", "output_layer.", "mtp.")


class Piece(NamedTuple):
    """Rows (columns when the cut axis is 1) of a stored tensor and their place in the local one.

    Attributes:
        part: which of the entry's Hugging Face tensors.
        start: the first row there.
        size: how many.
        at: the first row in the local tensor.
    """

    part: int
    start: int
    size: int
    at: int


class Cutting(NamedTuple):
    """One tensor-parallel rank's share of every tensor of a row.

    Attributes:
        axis: the axis that is cut.
        shape: the local shape.
        pieces: what the local tensor is made of, in local order; rows beyond them are padding.
        sends: what this rank, and no rank before it, contributes to an export.
    """

    axis: int
    shape: Shape
    pieces: tuple[Piece, ...]
    sends: tuple[Piece, ...]


class Shard(NamedTuple):
    """A tensor of one rank.

    Attributes:
        entry: the whole tensor it is cut from.
        chunk: the pipeline chunk it lies in.
        name: its name in that chunk; layers and experts are counted from 0 on every rank.
        cutting: its share of the whole.
        repeated: whether it repeats the first stage's embedding.
    """

    entry: Entry
    chunk: int
    name: str
    cutting: Cutting
    repeated: bool

    @property
    def shape(self) -> Shape:
        """The local shape."""
        return self.cutting.shape


class _Home(NamedTuple):
    """A place in the pipeline: stage, chunk, the layer's number there, and the local name pattern."""

    stage: int
    chunk: int
    layer: int | None = None
    pattern: str | None = None


class _RowPlan(NamedTuple):
    """What a row's tensors share: each rank's cutting, those that export something, the experts a rank has (0
    for dense ones), the homes.
    """

    cuttings: tuple[Cutting, ...]
    sending: tuple[tuple[int, Cutting], ...]
    experts: int
    homes: tuple[_Home, ...]


class Placement:
    """Where every tensor of a model lies in a layout.

    Args:
        table: the model's map.
        layout: the ranks.

    Raises:
        BridgeError: layers, experts or components that the layout does not divide, named.
    """

    def __init__(self, table: ModelMap, layout: Layout) -> None:
        self.table = table
        self.layout = layout
        self._trunk = {
            layer: (_Home(stage, chunk, layer - layers.start),)
            for stage, chunks in enumerate(layout.layers(table.trunk_layers))
            for chunk, layers in enumerate(chunks)
            for layer in layers
        }
        self._rows = {id(row): self._plan(row) for row in table.rows}

    def shards(self, rank: int) -> tuple[Shard, ...]:
        """The tensors of a rank, in the order of the table.

        The embedding is repeated on the last stage where the MTP layers or a tied head read it: under its own
        name for the former, as `output_layer.weight` for a tied head alone.

        Raises:
            BridgeError: there is no such rank.
        """
        return tuple(self._shards(self.layout.position(rank)))

    def sources(self, entry: Entry) -> list[tuple[int, Cutting]]:
        """The ranks that contribute to the export of a tensor, and what: each stored row exactly once."""
        plan = self._rows[id(entry.row)]
        sending = plan.sending
        home = (plan.homes or self._trunk[entry.layer or 0])[0]
        first = home.stage * (self.layout.world_size // self.layout.pipeline)
        if plan.experts:
            first += (entry.expert or 0) // plan.experts * self.layout.expert_size
        return [(first + i, cutting) for i, cutting in sending]

    def _shards(self, here: Position) -> Iterator[Shard]:
        rows, trunk = self._rows, self._trunk
        for entry in self.table.entries:
            row, _, _, layer, expert = entry
            cuttings, _, experts, homes = rows[id(row)]
            if experts:
                first = here.expert * experts
                if not first <= expert < first + experts:  # type: ignore[operator]
                    continue
                expert, cutting = expert - first, cuttings[here.expert_tensor]  # type: ignore[operator]
            else:
                cutting = cuttings[here.tensor]
            for home in homes or trunk[layer]:  # type: ignore[index]
                if home.stage == here.pipeline:
                    local = layer if home.layer is None else home.layer
                    same = local == layer and expert == entry.expert and home.pattern is None
                    name = (
                        entry.megatron if same else (home.pattern or row.megatron).format(i=local, e=expert)
                    )
                    yield Shard(entry, home.chunk, name, cutting, home is not homes[0] if homes else False)

    def _plan(self, row: Row) -> _RowPlan:
        experts = len(row.at.get("e", ()))
        if experts % self.layout.expert:
            raise BridgeError(
                f"{row.megatron}: {experts} experts cannot be spread over {self.layout.expert} "
                "expert-parallel ranks; choose a number of ranks that divides them"
            )
        ranks = self.layout.expert_size if experts else self.layout.tensor
        try:
            cuttings = _cuttings(row, self._padded(row.partition), ranks)
        except BridgeError as error:
            raise BridgeError(f"{row.megatron}: {error}") from error
        sending = tuple((i, cutting) for i, cutting in enumerate(cuttings) if cutting.sends)
        return _RowPlan(cuttings, sending, experts // self.layout.expert, self._homes(row))

    def _padded(self, partition: Partition) -> Partition:
        if isinstance(partition, Split) and partition.pad_multiple is not None:
            return replace(partition, pad_multiple=self.layout.vocab_multiple)
        return partition

    def _homes(self, row: Row) -> tuple[_Home, ...]:
        """The homes of a row outside the trunk; none for one of the trunk, whose layers have their own."""
        last = _Home(self.layout.pipeline - 1, self.layout.pipeline_chunks - 1)
        if row.megatron.startswith(TRUNK):
            return ()
        if row.megatron.startswith(_LAST_STAGE):
            return (last,)
        if row.megatron.startswith(_TOWER):
            return (_Home(0, 0),)
        if not row.megatron.startswith(_EMBEDDING):
            raise BridgeError(f"{row.megatron}: no rule says on which pipeline stage it lies")
        homes = [_Home(0, 0)]
        if self.layout.pipeline > 1 and self.table.mtp_layers:
            homes.append(last)
        elif self.layout.pipeline > 1 and self.table.tied:
            homes.append(last._replace(pattern=_HEAD))
        return tuple(homes)


def _cuttings(row: Row, partition: Partition, ranks: int) -> tuple[Cutting, ...]:
    """The share of every tensor-parallel rank."""
    axis, whole = partition.axis, row.megatron_shape
    runs = row.transform.runs(row.part_shapes) if axis == 0 else (Run(0, 0, whole[axis]),)
    if axis and len(row.hf) > 1:
        raise BridgeError("a tensor fused of several can only be cut along its rows")
    found, taken = [], set()
    for rank in range(ranks):
        cut = partition.cut(whole[axis], rank, ranks)
        pieces = pieces_of(runs, cut)
        # Ranks hold the same rows as a whole piece (a replica).
        sends = tuple(piece for piece in pieces if piece[:3] not in taken)
        taken |= {piece[:3] for piece in pieces}
        found.append(Cutting(axis, (*whole[:axis], cut.size, *whole[axis + 1 :]), pieces, sends))
    return tuple(found)


def pieces_of(runs: tuple[Run, ...], cut: Cut) -> tuple[Piece, ...]:
    """The stored rows behind a cut of the fused tensor, neighbours joined."""
    found: list[Piece] = []
    at = 0
    for start, size in cut.ranges:
        position = 0
        for run in runs:
            low, high = max(start, position), min(start + size, position + run.size)
            if low < high:
                piece = Piece(run.part, run.start + low - position, high - low, at)
                at += high - low
                last = found[-1] if found else None
                if last and last.part == piece.part and last.start + last.size == piece.start:
                    found[-1] = last._replace(size=last.size + piece.size)
                else:
                    found.append(piece)
            position += run.size
    return tuple(found)
