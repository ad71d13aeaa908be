"""Operations of the feed-forward: dense, or a mixture of experts. Letters: see `local`."""

from relax_core.plan.pen import FLOAT, INDEX, Pen
from relax_core.plan.tape import Buffer, Op, Work


def feed_forward(pen: Pen, normed: Buffer) -> Buffer:
    """The layer's feed-forward."""
    return _experts(pen, normed) if pen.local.model.experts else _mlp(pen, normed, pen.local.model.ffn_size)


def _mlp(pen: Pen, normed: Buffer, size: int) -> Buffer:
    inside, hidden = size // pen.local.tensor, pen.local.model.hidden_size
    return pen.row(
        "linear_fc2", _swiglu(pen, pen.column("linear_fc1", normed, hidden, 2 * inside)), inside, hidden
    )


def _swiglu(pen: Pen, fused: Buffer) -> Buffer:
    moved = (1.5 * fused.size, 2.5 * fused.size)
    return pen.pointwise("swiglu", (fused,), fused.size // 2, saves=(fused,), moved=moved)


def _experts(pen: Pen, normed: Buffer) -> Buffer:
    """Router, rows to experts and back, products, and the shared expert; experts are used alike."""
    local, model = pen.local, pen.local.model
    rows = local.between * model.experts_per_token
    chosen = _routed(pen, normed)
    order = Buffer(3 * rows * INDEX, needs_grad=False)
    moved = _rows(pen, "permute", normed, rows, order)
    away = local.parallel.expert * local.expert_ranks > 1
    moved = _sent(pen, moved, local.routed) if away else moved
    y = _products(pen, moved)
    y = _sent(pen, y, rows) if away else y
    out = pen.pointwise(
        "unpermute",
        (y, chosen),
        normed.size,
        saves=(y, chosen, order),
        moved=(y.size + normed.size, 3 * y.size),
    )
    shared = _mlp(pen, normed, model.shared_ffn_size)
    gated = pen.pointwise(
        "shared gate",
        (shared, normed),
        shared.size,
        saves=(shared, normed),
        moved=(3 * shared.size, 5 * shared.size),
    )
    return pen.residual(gated, out)


def _routed(pen: Pen, normed: Buffer) -> Buffer:
    """Weights and numbers of every token's experts; the router computes in float32."""
    local, model = pen.local, pen.local.model
    tokens, wide = local.between, local.between * model.hidden_size * FLOAT
    x = pen.pointwise("to float32", (normed,), wide, moved=(1.5 * wide, 1.5 * wide))
    # Without tensor cores a float32 product takes about four times as long.
    flops = 4 * 2.0 * tokens * model.hidden_size * model.experts
    logits = pen.add(
        Op(
            "router",
            (x,),
            (Buffer(tokens * model.experts * FLOAT),),
            (x,),
            weight_grad=2 * model.hidden_size * model.experts * FLOAT,
            forward=Work("matmul", flops, wide),
            backward=Work("matmul", 2 * flops, 2 * wide),
        )
    )
    chosen = Buffer(tokens * model.experts_per_token * (FLOAT + INDEX))
    return pen.add(
        Op("choose experts", (logits,), (chosen,), (logits, chosen), forward=Work(moved=logits.size))
    )


def _rows(pen: Pen, name: str, x: Buffer, rows: int, *kept: Buffer) -> Buffer:
    """Tokens as rows in another order; only the order is kept."""
    out = Buffer(rows * pen.local.model.hidden_size * pen.local.activation)
    work = Work(moved=x.size + out.size)
    return pen.add(Op(name, (x,), (out, *kept), kept, forward=work, backward=work))


def _sent(pen: Pen, x: Buffer, rows: int) -> Buffer:
    """Rows to other ranks by one all-to-all, then sorted."""
    local = pen.local
    ranks = local.parallel.expert * local.expert_ranks
    size = max(x.size, rows * local.model.hidden_size * local.activation)
    work = Work(moved=2 * size, sent=size * (ranks - 1) / ranks, over="expert")
    there = pen.add(Op("experts' all-to-all", (x,), (Buffer(size),), forward=work, backward=work))
    return _rows(pen, "sort rows", there, rows, Buffer(3 * rows * INDEX, needs_grad=False))


def _products(pen: Pen, rows: Buffer) -> Buffer:
    local, hidden = pen.local, pen.local.model.hidden_size
    inside = local.model.ffn_size // local.expert_ranks
    gated = _swiglu(pen, _grouped(pen, "experts' linear_fc1", rows, hidden, 2 * inside))
    return _grouped(pen, "experts' linear_fc2", gated, inside, hidden)


def _grouped(pen: Pen, name: str, x: Buffer, features: int, out_features: int) -> Buffer:
    size = pen.local.activation
    rows, weight = x.size // (features * size), pen.local.local_experts * features * out_features
    flops = 2.0 * rows * features * out_features
    moved = float(size * (rows * (features + out_features) + weight))
    return pen.add(
        Op(
            name,
            (x,),
            (Buffer(rows * out_features * size),),
            (x,),
            weight_grad=weight * size,
            forward=Work("matmul", flops, moved),
            backward=Work("matmul", 2 * flops, 2 * moved),
        )
    )
