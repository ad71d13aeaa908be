"""A layer of a Qwen3.5 model as operations: what it keeps, needs and costs on one rank.

Written after `relax_core.model` and the operators of `relax_kernels` (the Triton backend): a projection saves
its input, the convolution its input, the delta rule its inputs and the tables of every chunk, flash attention
queries, keys, values and output, SwiGLU the fused projection, a norm its input. `recompute` "selective" makes
norms, the token mixers' cores and the feed-forward again, "full" whole layers.
"""

from relax_core.plan.attention import attention
from relax_core.plan.delta import delta_net
from relax_core.plan.feed_forward import feed_forward
from relax_core.plan.pen import Pen
from relax_core.plan.tape import Buffer


def layer(pen: Pen, hidden: Buffer, kind: str) -> Buffer:
    """A whole layer, "linear_attention" or "full_attention": hidden states in, hidden states out."""
    if pen.recompute != "full":
        return _layer(pen, hidden, kind)
    pen.tape.part = "layers' inputs"
    return pen.checkpointed(f"{kind} layer", (hidden,), lambda inner: _layer(inner, hidden, kind))


def _layer(pen: Pen, hidden: Buffer, kind: str) -> Buffer:
    again = pen.recompute == "selective"
    pen.tape.part = "norms"
    normed = pen.norm(hidden, recomputed=again)
    full = kind == "full_attention"
    pen.tape.part = "full attention" if full else "delta net"
    hidden = pen.residual(hidden, attention(pen, normed) if full else delta_net(pen, normed))
    pen.tape.part = "norms"
    normed = pen.norm(hidden, recomputed=again)
    pen.tape.part = "experts" if pen.local.model.experts else "feed-forward"
    if again:
        fed = pen.checkpointed("feed-forward", (normed,), lambda inner: feed_forward(inner, normed))
    else:
        fed = feed_forward(pen, normed)
    return pen.residual(hidden, fed)
