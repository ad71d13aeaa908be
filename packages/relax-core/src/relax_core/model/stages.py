"""Which layers of the trunk lie on which pipeline stage."""

from collections.abc import Iterator
from itertools import accumulate, pairwise

from relax_core.device.parallel import ParallelConfig


def stage_layers(layers: int, parallel: ParallelConfig) -> tuple[tuple[range, ...], ...]:
    """The layers of every stage, one range per piece that it holds.

    As Megatron counts: a stage's layers are its share of each round through the pipeline.

    Args:
        layers: of the whole trunk.
        parallel: pipeline sizes; the first and the last stage may have fewer or more layers than the others.

    Raises:
        ValueError: the stages between have no equal share; the message names what works.
    """
    counts = _counts(layers, parallel)
    chunks = parallel.pipeline_chunks
    if not all(count and count % chunks == 0 for count in counts):
        raise ValueError(_refusal(layers, parallel))
    starts = accumulate([count // chunks for count in counts] * chunks, initial=0)
    pieces = [range(start, stop) for start, stop in pairwise(starts)]
    return tuple(tuple(pieces[stage :: parallel.pipeline]) for stage in range(parallel.pipeline))


def _counts(layers: int, parallel: ParallelConfig) -> list[int]:
    """Layers of every stage; 0 each if they do not spread."""
    fixed = {0: parallel.first_stage_layers, parallel.pipeline - 1: parallel.last_stage_layers}
    known = {stage: count for stage, count in fixed.items() if count is not None}
    free, left = parallel.pipeline - len(known), layers - sum(known.values())
    if left < 0 or (left % free if free else left):
        return [0] * parallel.pipeline
    return [known.get(stage, left // free if free else 0) for stage in range(parallel.pipeline)]


def _refusal(layers: int, parallel: ParallelConfig) -> str:
    pieces = parallel.pipeline * parallel.pipeline_chunks
    cut = f"pipeline {parallel.pipeline} x pipeline_chunks {parallel.pipeline_chunks} = {pieces} pieces"
    ends = [
        f"{name} {getattr(parallel, name)}"
        for name in ("first_stage_layers", "last_stage_layers")
        if getattr(parallel, name) is not None
    ]
    given = f" with {' and '.join(ends)}" if ends else " of one size"
    return f"{layers} layers cannot be cut into {cut}{given}; {_what_works(layers, parallel)}"


def _what_works(layers: int, parallel: ParallelConfig) -> str:
    sizes = [size for size in range(1, layers + 1) if _fits(layers, parallel, pipeline=size)]
    near = [size for size in sizes if size < parallel.pipeline][-1:] + [
        size for size in sizes if size > parallel.pipeline
    ][:1]
    chunks = [n for n in range(1, parallel.pipeline_chunks) if _fits(layers, parallel, pipeline_chunks=n)]
    ways = [
        f"{name} to {' or '.join(map(str, found))}"
        for name, found in (("pipeline", near), ("pipeline_chunks", chunks[-1:]))
        if found
    ]
    best = min(_uneven(layers, parallel), default=None)
    if best is not None:
        _most, _spread, first, last, others = best
        where = f" (the others have {others})" if parallel.pipeline > 2 else ""
        ways.append(f"first_stage_layers to {first} and last_stage_layers to {last}{where}")
    return f"set {', or '.join(ways or [_several(layers, parallel)])}"


def _several(layers: int, parallel: ParallelConfig) -> str:
    """A cut near the one that was asked for, where no single change makes one."""
    even = [size for size in range(1, layers + 1) if layers % size == 0]
    pipeline = min(even, key=lambda size: (abs(size - parallel.pipeline), size))
    most = parallel.pipeline_chunks if pipeline > 1 else 1
    chunks = max(n for n in range(1, most + 1) if layers // pipeline % n == 0)
    ends = parallel.first_stage_layers or parallel.last_stage_layers
    rest = ", first_stage_layers and last_stage_layers to null" if ends else ""
    return f"pipeline to {pipeline} and pipeline_chunks to {chunks}{rest}"


def _fits(layers: int, parallel: ParallelConfig, **changes: int) -> bool:
    """Whether one other size works beside the rest as it is."""
    names = ("pipeline", "pipeline_chunks", "first_stage_layers", "last_stage_layers")
    try:
        changed = ParallelConfig(**{name: getattr(parallel, name) for name in names} | changes)
    except ValueError:
        return False
    return all(count and count % changed.pipeline_chunks == 0 for count in _counts(layers, changed))


def _uneven(layers: int, parallel: ParallelConfig) -> Iterator[tuple[int, int, int, int, int]]:
    """Of each cut with free ends: (most layers of a stage, spread, first, last, others)."""
    chunks, between = parallel.pipeline_chunks, parallel.pipeline - 2
    if between < 0:
        return
    for first in range(chunks, layers, chunks):
        for last in range(chunks, layers - first + 1, chunks):
            left = layers - first - last
            others = left // between if between else 0
            if left != others * between or (between and (others < chunks or others % chunks)):
                continue
            counts = [first, last, *([others] if between else [])]
            yield max(counts), max(counts) - min(counts), first, last, others
