"""Gated full attention's operations. Letters: see `local`."""

from relax_core.plan.pen import FLOAT, Pen
from relax_core.plan.tape import Buffer, Op, Work

SHORTEST_DENSE, LEAST_DENSE = 2048, 4096
"""Tokens of a sequence and in all from which equal sequences take the faster form."""


def attention(pen: Pen, normed: Buffer) -> Buffer:
    """Projection, norms and angles of heads, flash attention, output gate, projection."""
    local, model = pen.local, pen.local.model
    fused = pen.column("linear_qkv", normed, model.hidden_size, local.qkv_width)
    if pen.recompute == "selective":
        mixed = pen.checkpointed("attention core", (fused,), lambda inner: _core(inner, fused))
    else:
        mixed = _core(pen, fused)
    return pen.row("linear_proj", mixed, local.heads * model.head_dim, model.hidden_size)


def _core(pen: Pen, fused: Buffer) -> Buffer:
    local, size = pen.local, pen.local.activation
    dim, sharing = local.model.head_dim, local.kv_sharing
    queries = local.tokens * local.heads * dim * size
    keys = local.tokens * local.kv_heads * dim * size
    q, gate, k, v = pen.split(fused, [queries, queries, keys // sharing, keys // sharing])
    if sharing > 1:
        k, v = pen.split(_joined(pen, k, v), [keys, keys])
    if local.kv_heads > 1:
        # The query heads of several groups lie apart in the projection: they are copied, as are the gates.
        q, gate = (pen.pointwise("copy", (x,), x.size, moved=(2 * x.size, 0)) for x in (q, gate))
    q, k = (_turned(pen, x) for x in (q, k))
    o = _attend(pen, q, k, v)
    return pen.pointwise("output gate", (o, gate), o.size, saves=(o, gate), moved=(3 * o.size, 5 * o.size))


def _joined(pen: Pen, k: Buffer, v: Buffer) -> Buffer:
    """The whole key and value head, from the ranks that hold shares of it."""
    own = k.size + v.size
    everyone = own * pen.local.tensor
    work = Work(moved=2 * everyone, sent=everyone - own)
    return pen.add(
        Op(
            "join key/value shares",
            (k, v),
            (Buffer(own * pen.local.kv_sharing),),
            forward_extra=everyone,
            backward_extra=everyone,
            forward=work,
            backward=work,
        )
    )


def _turned(pen: Pen, x: Buffer) -> Buffer:
    normed = pen.norm(x)
    return pen.pointwise("rotary", (normed,), x.size, moved=(2 * x.size, 2 * x.size))


def _attend(pen: Pen, q: Buffer, k: Buffer, v: Buffer) -> Buffer:
    local, ranks = pen.local, pen.local.context
    if ranks == 1:
        return _flash(pen, q, k, v, local.tokens, local.heads)
    if local.attention_way == "gather":
        both = k.size + v.size
        work = Work(moved=4 * both * ranks, sent=both * (ranks - 1), over="context")
        gathered = pen.add(
            Op(
                "gather keys and values",
                (k, v),
                (Buffer(both * ranks),),
                forward_extra=both * (ranks + 1),
                backward_extra=both * (ranks + 1),
                forward=work,
                backward=work,
            )
        )
        k, v = pen.split(gathered, [k.size * ranks, v.size * ranks])
        return _flash(pen, q, k, v, local.tokens, local.heads)
    if local.kv_heads < ranks:
        # Several ranks attend with one key/value head.
        wide = ranks // local.kv_heads
        k, v = (pen.pointwise("repeat", (x,), wide * x.size, moved=(2 * wide * x.size,) * 2) for x in (k, v))
    row = pen.exchange("attention to heads", (q, k, v))
    q, k, v = pen.split(row, [q.size, k.size, v.size])
    o = _flash(pen, q, k, v, local.tokens * ranks, local.heads // ranks)
    return pen.exchange("attention back", (o,))


def _flash(pen: Pen, q: Buffer, k: Buffer, v: Buffer, tokens: int, heads: int) -> Buffer:
    """Causal: a token sees half of its sample on average."""
    flops = 2.0 * tokens * pen.local.sample * heads * pen.local.model.head_dim
    # Rows of one length take cuDNN's form (`relax_kernels.triton_backend.dense_attention`).
    whole = pen.local.context == 1 or pen.local.attention_way == "heads"
    dense = pen.local.even and whole and pen.local.sample >= SHORTEST_DENSE and tokens >= LEAST_DENSE
    kind = "dense attention" if dense else "attention"
    o, lse = Buffer(q.size), Buffer(tokens * heads * FLOAT, needs_grad=False)
    moved = float(2 * q.size + k.size + v.size)
    return pen.add(
        Op(
            "attention",
            (q, k, v),
            (o, lse),
            (q, k, v, o, lse),
            # The gradient of the queries adds up in float32.
            backward_extra=q.size * FLOAT // pen.local.activation,
            forward=Work(kind, flops, moved),
            backward=Work(kind, 2.5 * flops, 3 * moved),
        )
    )
