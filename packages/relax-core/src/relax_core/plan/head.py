"""Embedding and log-probabilities as operations. Letters: see `local`; S scored positions."""

from relax_core.plan.pen import FLOAT, INDEX, Pen
from relax_core.plan.tape import Buffer, Op, Work

LOGITS_AT_ONCE = 1 << 27
"""float32 logits that exist at once (`relax_kernels.triton_backend.logprob_slices`)."""
MIN_SLICE = 1024
"""Vocabulary entries of a slice, at least."""


def slice_width(tokens: int, vocabulary: int) -> int:
    """Vocabulary entries whose logits exist at once."""
    widest = max(MIN_SLICE, LOGITS_AT_ONCE // max(tokens, 1))
    count = -(-vocabulary // widest)
    return min(vocabulary, -(-vocabulary // (count * 256)) * 256)


def embed(pen: Pen, name: str = "embedding", *, trains: bool = True) -> Buffer:
    """Tokens to hidden states; the gradient of the whole embedding is dense."""
    local = pen.local
    whole = local.whole_hidden
    weight = local.vocab * local.model.hidden_size * local.activation
    extra = whole if local.parallel.sequence else 0
    return pen.add(
        Op(
            name,
            (),
            (Buffer(local.hidden, needs_grad=trains),),
            forward_extra=extra,
            backward_extra=extra,
            weight_grad=weight if trains else 0,
            forward=Work(moved=2 * whole),
            backward=Work(moved=2 * whole + weight if trains else 0),
        )
    )


def gather_tokens(pen: Pen, hidden: Buffer) -> Buffer:
    """Under sequence parallelism the head takes all tokens."""
    local = pen.local
    if not local.parallel.sequence:
        return hidden
    return pen.add(
        Op(
            "gather tokens",
            (hidden,),
            (Buffer(local.whole_hidden, needs_grad=hidden.needs_grad),),
            forward=Work(moved=2 * local.whole_hidden, sent=float(local.hidden * (local.tensor - 1))),
            backward=Work(moved=local.hidden),
        )
    )


def logprobs(pen: Pen, hidden: Buffer, name: str, *, trains: bool, tied: bool, entropy: bool) -> Buffer:
    """Log-probs of the targets: scored positions are picked, then slices of the vocabulary pass by.

    Args:
        pen: writes.
        hidden: hidden states of all tokens.
        name: whose head.
        trains: whether the head gets a gradient.
        tied: whether that waits for the embedding's, which comes last.
        entropy: whether the entropy is needed too.
    """
    local, size = pen.local, pen.local.activation
    scored, width = local.scored, local.model.hidden_size
    picked_size = scored * width * size
    picked = pen.add(
        Op(
            f"{name}: scored positions",
            (hidden,),
            (Buffer(picked_size, needs_grad=hidden.needs_grad),),
            # Positions, sorted for adding up.
            backward_extra=4 * scored * INDEX,
            forward=Work(moved=2 * picked_size),
            backward=Work(moved=picked_size + 2 * hidden.size),
        )
    )
    if not trains and not entropy:
        return _fixed_head(pen, picked, name)
    logits = scored * slice_width(scored, local.vocab)
    flops, passed = 2.0 * scored * width * local.vocab, float(scored * local.vocab)
    weight = local.vocab * width * size
    statistics = Buffer(scored * FLOAT * (4 if entropy else 3), needs_grad=False)
    return pen.add(
        Op(
            name,
            (picked,),
            (Buffer(scored * FLOAT), statistics),
            (picked, statistics),
            forward_extra=logits * FLOAT,
            backward_extra=logits * (FLOAT + size) + scored * width * FLOAT,
            weight_grad=weight if trains and not tied else 0,
            held_grad=weight if trains and tied else 0,
            forward=Work(
                "matmul", flops, 2 * FLOAT * passed + weight, 4.0 * scored * FLOAT * (local.tensor > 1)
            ),
            # Logits again, then the gradients of hidden states and weight.
            backward=Work(
                "matmul",
                (3 if trains else 2) * flops,
                (3 * FLOAT + 3 * size) * passed + (4 if trains else 2) * weight,
                _reduced(pen),
            ),
        )
    )


def _fixed_head(pen: Pen, picked: Buffer, name: str) -> Buffer:
    """A head that is not trained: hidden's gradient is made with the log-probs, and kept in float32."""
    local, size = pen.local, pen.local.activation
    scored, width = local.scored, local.model.hidden_size
    logits = scored * slice_width(scored, local.vocab)
    gradient = Buffer(scored * width * FLOAT, needs_grad=False)
    flops, passed = 4.0 * scored * width * local.vocab, float(scored * local.vocab)
    return pen.add(
        Op(
            name,
            (picked,),
            (Buffer(scored * FLOAT), gradient),
            (gradient,),
            # Logits and their shares of one slice, and the targets' rows of the weight in float32.
            forward_extra=max(logits * (FLOAT + size), gradient.size),
            backward_extra=gradient.size,
            forward=Work(
                "matmul",
                flops,
                (3 * FLOAT + 2 * size) * passed + 2 * local.vocab * width * size,
                _reduced(pen) + 4.0 * scored * FLOAT * (local.tensor > 1),
            ),
            backward=Work(moved=3 * gradient.size),
        )
    )


def _reduced(pen: Pen) -> float:
    """Bytes that a rank sends to sum hidden's gradient over the vocabulary's ranks."""
    local = pen.local
    whole = local.scored * local.model.hidden_size * FLOAT
    return 2.0 * whole * (local.tensor - 1) / local.tensor
