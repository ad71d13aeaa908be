"""The tape of one micro-batch on one pipeline stage: embedding, layers, head and draft layers."""

from dataclasses import dataclass

from relax_core.model.lora_config import LoraConfig
from relax_core.model.mtp_config import MtpConfig
from relax_core.plan.head import embed, gather_tokens, logprobs
from relax_core.plan.layers import layer
from relax_core.plan.local import Local
from relax_core.plan.pen import FLOAT, Pen
from relax_core.plan.tape import Buffer, Op, Tape, Work, frozen, without_gradients
from relax_core.plan.vision import Sight, see


@dataclass(frozen=True)
class Stage:
    """What a rank of a pipeline stage runs.

    Attributes:
        local: sizes.
        kinds: types of its layers, in order.
        first, last: whether it embeds tokens, and whether it has the head.
        recompute: see `relax_core.plan.layers`.
        mtp: of the draft layers, which the last stage has.
        entropy: whether the loss needs the entropy of every position.
        sight: the pictures that the first stage sees; None without.
        lora: adapters, which are then trained alone; None trains the weights.
    """

    local: Local
    kinds: tuple[str, ...]
    first: bool
    last: bool
    recompute: str
    mtp: MtpConfig
    entropy: bool = False
    sight: Sight | None = None
    lora: LoraConfig | None = None

    @property
    def depths(self) -> int:
        """Draft depths that are trained here."""
        trained = self.mtp.loss_coefficient > 0
        return self.local.model.mtp_layers * self.mtp.repeated if self.last and trained else 0

    def tape(self) -> Tape:
        """Forward and backward pass of one micro-batch; what adapters add to it is not reckoned."""
        return frozen(self._tape()) if self.lora is not None else self._tape()

    def _tape(self) -> Tape:
        # Where the draft layers are trained alone the trunk runs without gradients, and keeps nothing.
        pen = Pen(self.local, "none" if self.mtp.only else self.recompute)
        pen.tape.part = "embedding"
        hidden = embed(pen) if self.first else Buffer(self.local.hidden)
        if self.first and self.sight is not None:
            hidden = see(pen, hidden, self.sight)
        for kind in self.kinds:
            hidden = layer(pen, hidden, kind)
        if not self.last:
            pen.tape.part = "layers' inputs"
            pen.add(Op("send", (hidden,), (Buffer(hidden.size),), (hidden,), passes_grad=True))
            return pen.tape
        pen.tape.part = "head"
        tied = self.local.model.tied and self.first
        hidden = gather_tokens(pen, pen.norm(hidden))
        losses = [logprobs(pen, hidden, "head", trains=self.lora is None, tied=tied, entropy=self.entropy)]
        if self.mtp.only:
            losses, pen = [], Pen(self.local, self.recompute, without_gradients(pen.tape))
        draft = Buffer(hidden.size, hidden, needs_grad=False) if self.mtp.detach_trunk else hidden
        for depth in range(self.depths):
            pen.tape.part = "draft layers"
            draft = self._draft(pen, draft, depth)
            trains = not self.mtp.detach_head
            losses.append(logprobs(pen, draft, "draft head", trains=trains, tied=tied, entropy=False))
        pen.add(Op("loss", tuple(losses), (Buffer(FLOAT),)))
        return pen.tape

    def _draft(self, pen: Pen, hidden: Buffer, depth: int) -> Buffer:
        """One draft layer on the hidden states of the one before."""
        local = self.local
        name = f"draft layer {depth}"
        embedding = embed(pen, f"{name}: embedding", trains=not self.mtp.detach_embedding)
        if local.parallel.sequence:
            own = Buffer(local.hidden, needs_grad=hidden.needs_grad)
            hidden = pen.add(Op("own tokens", (hidden,), (own,), forward=Work(moved=2 * local.hidden)))
        if self.recompute == "full":
            drafted = pen.checkpointed(
                name, (embedding, hidden), lambda inner: _joined(inner, embedding, hidden), recompute="full"
            )
        else:
            drafted = _joined(pen, embedding, hidden)
        return gather_tokens(pen, drafted)


def _joined(pen: Pen, embedding: Buffer, hidden: Buffer) -> Buffer:
    local, width = pen.local, pen.local.model.hidden_size
    one, two = pen.norm(embedding), pen.norm(hidden)
    both = pen.pointwise("join", (one, two), 2 * one.size, moved=(4 * one.size, 4 * one.size))
    out = pen.column("eh_proj", both, 2 * width, width // local.tensor)
    if local.tensor > 1:
        whole = local.whole_hidden
        out = pen.add(
            Op(
                "gather features",
                (out,),
                (Buffer(local.hidden),),
                forward_extra=2 * whole,
                forward=Work(moved=4 * whole, sent=float(whole)),
                backward=Work(moved=2 * whole),
            )
        )
    part = pen.tape.part
    out = layer(pen, out, "full_attention")
    pen.tape.part = part
    return pen.norm(out)
