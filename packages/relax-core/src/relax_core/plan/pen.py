"""Writes operations of a model on a tape. Letters: see `local`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from relax_core.plan.local import Local
from relax_core.plan.tape import Buffer, Op, Tape, Work

FLOAT = 4
"""Bytes of a float32."""
INDEX = 8
"""Bytes of an int64."""


@dataclass(frozen=True)
class Pen:
    """A tape, and what is to be written on it.

    Attributes:
        local: sizes of the rank.
        recompute: what the backward pass computes again: "none", "selective" or "full".
        tape: where operations go.
    """

    local: Local
    recompute: str
    tape: Tape = field(default_factory=Tape)

    def add(self, op: Op) -> Buffer:
        """Appends an operation; its first output."""
        return self.tape.add(op)[0]

    def split(self, source: Buffer, sizes: list[int]) -> tuple[Buffer, ...]:
        """Views of `source`, whose gradients are joined into one."""
        return self.tape.add(Op("split", (source,), tuple(Buffer(size, source) for size in sizes)))

    def pointwise(
        self,
        name: str,
        inputs: tuple[Buffer, ...],
        size: int,
        *,
        saves: tuple[Buffer, ...] = (),
        moved: tuple[float, float],
        recomputed: bool = False,
    ) -> Buffer:
        """An operation that only reads and writes.

        Args:
            name: for a person.
            inputs: what it reads.
            size: bytes of its result.
            saves: inputs kept for the backward pass.
            moved: bytes read and written in the forward and in the backward pass.
            recomputed: see `Op`.
        """
        works = [Work(moved=bytes_moved) for bytes_moved in moved]
        return self.add(
            Op(
                name,
                inputs,
                (Buffer(size),),
                saves,
                recomputed=recomputed,
                forward=works[0],
                backward=works[1],
            )
        )

    def norm(self, x: Buffer, *, recomputed: bool = False) -> Buffer:
        """An RMS norm: keeps its input."""
        moved = (2 * x.size, 3 * x.size)
        return self.pointwise("norm", (x,), x.size, saves=(x,), moved=moved, recomputed=recomputed)

    def residual(self, x: Buffer, y: Buffer) -> Buffer:
        """x + y."""
        op = Op("residual", (x, y), (Buffer(x.size),), passes_grad=True, forward=Work(moved=3 * x.size))
        return self.add(op)

    def exchange(self, name: str, parts: tuple[Buffer, ...]) -> Buffer:
        """Tokens for heads between context-parallel ranks, or back: copied, received, put in order."""
        total = sum(part.size for part in parts)
        ranks = self.local.context
        work = Work(moved=6 * total, sent=total * (ranks - 1) / ranks, over="context")
        extra = 2 * total
        return self.add(
            Op(
                name,
                parts,
                (Buffer(total),),
                forward_extra=extra,
                backward_extra=extra,
                forward=work,
                backward=work,
            )
        )

    def column(self, name: str, x: Buffer, features: int, out_features: int) -> Buffer:
        """A projection whose output features are spread over the tensor-parallel ranks; keeps its input."""
        local = self.local
        whole = local.tokens * features * local.activation
        sent = whole * (local.tensor - 1) / local.tensor
        spread = local.parallel.sequence
        return self._projection(
            Op(
                name,
                (x,),
                (Buffer(local.tokens * out_features * local.activation),),
                # The whole input's gradient, before its parts are summed over the ranks.
                backward_extra=whole if spread else 0,
                forward=Work(sent=sent if spread else 0.0),
                backward=Work(sent=2 * sent),
            ),
            features * out_features,
            features + out_features,
        )

    def row(self, name: str, x: Buffer, features: int, out_features: int) -> Buffer:
        """A projection whose input features are spread; its outputs are summed over the ranks."""
        local = self.local
        whole = local.tokens * out_features * local.activation
        sent = whole * (local.tensor - 1) / local.tensor
        spread = local.parallel.sequence
        return self._projection(
            Op(
                name,
                (x,),
                (Buffer(local.between * out_features * local.activation),),
                forward_extra=whole if spread else 0,
                backward_extra=whole if spread else 0,
                forward=Work(sent=sent if spread else 2 * sent),
                backward=Work(sent=sent if spread else 0.0),
            ),
            features * out_features,
            features + out_features,
        )

    def _projection(self, op: Op, weight: int, wide: int) -> Buffer:
        tokens, size = self.local.tokens, self.local.activation
        flops, moved = 2.0 * tokens * weight, float(size * (tokens * wide + weight))
        return self.add(
            replace(
                op,
                saves=op.inputs,
                weight_grad=weight * size,
                forward=replace(op.forward, kind="matmul", flops=flops, moved=moved),
                backward=replace(op.backward, kind="matmul", flops=2 * flops, moved=2 * moved),
            )
        )

    def checkpointed(
        self,
        name: str,
        inputs: tuple[Buffer, ...],
        write: "Callable[[Pen], Buffer]",
        *,
        recompute: str = "none",
    ) -> Buffer:
        """What `write` appends, as one operation that keeps its inputs alone."""
        inner = Pen(self.local, recompute, Tape(part=self.tape.part))
        out = write(inner)
        return self.add(Op(name, inputs, (Buffer(out.size),), inputs, inner=inner.tape))
