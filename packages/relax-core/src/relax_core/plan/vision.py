"""The vision tower's operations on the pictures of a row.

P patches of the row's pictures, V hidden, F inside the feed-forward. Every tensor-parallel and
context-parallel rank of the first stage computes all pictures (`relax_core.model.vision.tower`): nothing here
is spread.
"""

from dataclasses import dataclass
from functools import partial

from relax_core.model.vision.config import VisionConfig
from relax_core.plan.pen import FLOAT, INDEX, Pen
from relax_core.plan.tape import Buffer, Op, Work, without_gradients

CORNERS = 4
"""Learned positions that a patch's own is made of."""


@dataclass(frozen=True)
class Sight:
    """What a stage sees.

    Attributes:
        tower: its sizes.
        patches: of the pictures of a row.
        picture: patches of one picture, which see one another alone.
        trained: whether the tower is.
    """

    tower: VisionConfig
    patches: int
    picture: int
    trained: bool


def see(pen: Pen, hidden: Buffer, sight: Sight) -> Buffer:
    """Embeddings with what the tower makes of the pictures in the place of their tokens."""
    part, pen.tape.part = pen.tape.part, "vision tower"
    numbers = Buffer(sight.patches * sight.tower.patch_features * FLOAT, needs_grad=False)
    # The micro-batch holds its pictures in float32 to its end.
    pen.add(Op("pictures", (), (numbers,), (numbers,)))
    inner = Pen(pen.local, pen.recompute if sight.trained else "none")
    features = _tower(inner, numbers, sight)
    if not sight.trained:
        # Nothing is kept, and the features take no gradient.
        features = Buffer(features.size, features, needs_grad=False)
    for op in (inner.tape if sight.trained else without_gradients(inner.tape)).ops:
        pen.tape.add(op)
    pen.tape.part = part
    moved = (2 * hidden.size + 2 * features.size, hidden.size + 2 * features.size)
    return pen.pointwise("place pictures", (hidden, features), hidden.size, moved=moved)


def _tower(pen: Pen, numbers: Buffer, sight: Sight) -> Buffer:
    tower, size = sight.tower, pen.local.activation
    patches, wide = sight.patches, sight.tower.hidden_size
    stream = patches * wide * size
    cast = Buffer(patches * tower.patch_features * size, needs_grad=False)
    pen.add(Op("cast", (numbers,), (cast,), forward=Work(moved=float(numbers.size + cast.size))))
    x = _projection(pen, "patch projection", cast, patches, tower.patch_features, wide)
    index, weight = CORNERS * patches * INDEX, CORNERS * patches * FLOAT
    table = tower.side**2 * wide * size
    corners = CORNERS * stream
    rows = Buffer(index + weight, needs_grad=False)
    places = pen.add(
        Op(
            "learned positions",
            (),
            (Buffer(stream), rows),
            (rows,),
            # Four rows of the table for each patch, weighted in float32.
            forward_extra=corners + CORNERS * patches * wide * FLOAT + patches * wide * FLOAT,
            backward_extra=CORNERS * patches * wide * FLOAT + corners,
            weight_grad=table,
            forward=Work(moved=3.0 * corners),
            backward=Work(moved=3.0 * corners),
        )
    )
    x = pen.residual(x, places)
    angles = Buffer(2 * patches * (wide // tower.heads) * FLOAT, needs_grad=False)
    pen.add(Op("angles", (), (angles,), (angles,)))
    for number in range(tower.depth):
        if pen.recompute == "full":
            x = pen.checkpointed(f"vision block {number}", (x,), partial(_block, x=x, sight=sight))
        else:
            x = _block(pen, x, sight)
    joined = wide * tower.merge**2
    tokens = patches // tower.merge**2
    x = _norm(pen, x, patches)
    x = _projection(pen, "merger.linear_fc1", x, tokens, joined, joined)
    x = pen.pointwise("gelu", (x,), x.size, saves=(x,), moved=(2 * x.size, 3 * x.size))
    return _projection(pen, "merger.linear_fc2", x, tokens, joined, tower.out_size)


def _block(pen: Pen, x: Buffer, sight: Sight) -> Buffer:
    tower, patches = sight.tower, sight.patches
    wide, stream = tower.hidden_size, x.size
    fused = _projection(pen, "qkv", _norm(pen, x, patches), patches, wide, 3 * wide)
    q, k, v = pen.split(fused, [stream] * 3)
    q, k = (pen.pointwise("rotary", (part,), stream, moved=(2 * stream, 2 * stream)) for part in (q, k))
    flops = 4.0 * patches * min(patches, sight.picture) * wide
    statistics = Buffer(patches * tower.heads * FLOAT, needs_grad=False)
    o = Buffer(stream)
    pen.add(
        Op(
            "attention",
            (q, k, v),
            (o, statistics),
            (q, k, v, o, statistics),
            backward_extra=stream,
            forward=Work("attention", flops, 4.0 * stream),
            backward=Work("attention", 2.5 * flops, 8.0 * stream),
        )
    )
    x = pen.residual(x, _projection(pen, "proj", o, patches, wide, wide))
    h = _projection(pen, "linear_fc1", _norm(pen, x, patches), patches, wide, tower.ffn_size)
    h = pen.pointwise("gelu", (h,), h.size, saves=(h,), moved=(2 * h.size, 3 * h.size))
    return pen.residual(x, _projection(pen, "linear_fc2", h, patches, tower.ffn_size, wide))


def _norm(pen: Pen, x: Buffer, rows: int) -> Buffer:
    """A layer norm: keeps its input, mean and deviation of every row."""
    statistics = Buffer(2 * rows * FLOAT, needs_grad=False)
    return pen.add(
        Op(
            "layer norm",
            (x,),
            (Buffer(x.size), statistics),
            (x, statistics),
            forward=Work(moved=2.0 * x.size),
            backward=Work(moved=3.0 * x.size),
        )
    )


def _projection(pen: Pen, name: str, x: Buffer, rows: int, features: int, out: int) -> Buffer:
    """A whole projection: keeps its input."""
    size = pen.local.activation
    flops, moved = 2.0 * rows * features * out, float(size * (rows * (features + out) + features * out))
    return pen.add(
        Op(
            name,
            (x,),
            (Buffer(rows * out * size),),
            (x,),
            weight_grad=(features + 1) * out * size,
            forward=Work("matmul", flops, moved),
            backward=Work("matmul", 2 * flops, 2 * moved),
        )
    )
