"""The gated delta net's operations. Letters: see `local`."""

from relax_core.plan.local import CHUNK
from relax_core.plan.pen import FLOAT, Pen
from relax_core.plan.tape import Buffer, Op, Work


def delta_net(pen: Pen, normed: Buffer) -> Buffer:
    """Projection, convolution, rule, gated norm, projection."""
    model = pen.local.model
    keys, values = pen.local.delta_heads
    width = values * model.delta_value_dim
    fused_width = 2 * keys * model.delta_key_dim + 2 * width + 2 * values
    fused = pen.column("delta in_proj", normed, model.hidden_size, fused_width)
    if pen.recompute == "selective":
        mixed = pen.checkpointed("delta core", (fused,), lambda inner: _core(inner, fused))
    else:
        mixed = _core(pen, fused)
    return pen.row("delta out_proj", mixed, width, model.hidden_size)


def _core(pen: Pen, fused: Buffer) -> Buffer:
    local, model, size = pen.local, pen.local.model, pen.local.activation
    keys, values = local.delta_heads
    tokens, width = local.tokens, values * model.delta_value_dim
    conv = 2 * keys * model.delta_key_dim + width
    qkv, z, b, a = pen.split(fused, [tokens * n * size for n in (conv, width, values, values)])
    if local.context == 1:
        o = _rule(pen, (qkv, b, a), tokens, keys, values)
    else:
        heads = local.delta_way == "heads"
        row = pen.exchange(f"delta net to {'heads' if heads else 'pieces'}", (qkv, b, a))
        own = pen.split(row, [part.size for part in (qkv, b, a)])
        ranks = local.context
        if heads:
            o = _rule(pen, own, tokens * ranks, keys // ranks, values // ranks)
        else:
            # The tokens whose sample began on an earlier rank are scanned twice.
            o = _rule(pen, own, tokens, keys, values, scans=2)
        o = pen.exchange("delta net back", (o,))
    return pen.pointwise("gated norm", (o, z), o.size, saves=(o, z), moved=(3 * o.size, 5 * o.size))


def _rule(
    pen: Pen, inputs: tuple[Buffer, ...], tokens: int, keys: int, values: int, *, scans: int = 1
) -> Buffer:
    """Convolution, gates and gated delta rule over `tokens` tokens."""
    model, size = pen.local.model, pen.local.activation
    dim, wide = model.delta_key_dim, model.delta_value_dim
    qkv, b, a = inputs
    conv = pen.pointwise("convolution", (qkv,), qkv.size, saves=(qkv,), moved=(2 * qkv.size, 4 * qkv.size))
    each = tokens * keys * dim * size
    q, k, v = pen.split(conv, [each, each, tokens * values * wide * size])
    small = a.size + b.size
    g, beta = pen.tape.add(
        Op(
            "gates",
            (a, b),
            (Buffer(tokens * values * FLOAT), Buffer(tokens * values * size)),
            (a, b),
            forward=Work(moved=2 * small),
            backward=Work(moved=4 * small),
        )
    )
    # Inverse and scores of each chunk, decay and step per value head, norms of queries and keys.
    tables = Buffer(tokens * (2 * values * CHUNK * size + 2 * FLOAT * (values + keys)), needs_grad=False)
    o = Buffer(tokens * values * wide * size)
    # The backward pass makes the states before each chunk and the updates inside it again, forth and back.
    trace = tokens * values * (dim * wide // CHUNK + wide) * size
    flops = float(scans * tokens * values * (6 * dim * wide + 4 * CHUNK * (dim + wide)))
    moved = float(scans * (sum(x.size for x in (q, k, v, g, beta, o)) + 2 * tables.size))
    chain = scans * min(tokens, pen.local.sample) / CHUNK
    return pen.add(
        Op(
            "delta rule",
            (q, k, v, g, beta),
            (o, tables),
            (q, k, v, g, beta, tables),
            backward_extra=2 * trace + 4 * tokens * values * FLOAT,
            forward=Work("scan", flops, moved, chain=chain),
            backward=Work("scan", 3 * flops, 3 * moved + 4 * scans * trace, chain=2 * chain),
        )
    )
