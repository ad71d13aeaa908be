"""A tape of operations with the bytes they keep, and the peak of memory of running it forth and back.

Autograd keeps what an operation saves until its backward pass has run, and gradients until they are consumed.
So a peak follows from a list: what is saved by whom, what is used last by whom, and what each operation needs
for itself. Nothing here knows a model or a device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor of the tape.

    Attributes:
        size: its bytes (those of its gradient too).
        storage: the buffer whose memory it is: itself, or the one that it is a view of.
        needs_grad: whether the backward pass makes a gradient for it.
    """

    size: int
    base: "Buffer | None" = None
    needs_grad: bool = True

    @property
    def storage(self) -> "Buffer":
        """The buffer that owns the memory."""
        return self.base.storage if self.base is not None else self


@dataclass(frozen=True)
class Work:
    """What one pass of an operation costs.

    Attributes:
        kind: of arithmetic: "matmul", "attention", "dense attention", "scan" or "memory" (reads and writes).
        flops: floating-point operations.
        moved: bytes read and written.
        sent: bytes that this rank gives to others.
        over: which ranks they are: "tensor", "context", "expert", "pipeline" or "data".
        chain: steps that wait for one another, as those of a scan over chunks.
    """

    kind: str = "memory"
    flops: float = 0.0
    moved: float = 0.0
    sent: float = 0.0
    over: str = "tensor"
    chain: float = 0.0


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: for a person.
        inputs, outputs: buffers.
        saves: buffers kept for the backward pass.
        forward_extra, backward_extra: bytes that it needs for itself while it runs.
        weight_grad: bytes of its weights' gradients, gone once they are added to the gradient buffer.
        held_grad: bytes of a gradient that stays until the tape's end (a weight that is used twice).
        recomputed: whether the outputs are let go after their last use and made again in the backward pass.
        passes_grad: whether the gradient of the output is that of every input, without a copy.
        forward, backward: their costs.
        inner: what it consists of, if it is checkpointed as a whole.
    """

    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    saves: tuple[Buffer, ...] = ()
    forward_extra: int = 0
    backward_extra: int = 0
    weight_grad: int = 0
    held_grad: int = 0
    recomputed: bool = False
    passes_grad: bool = False
    forward: Work = Work()
    backward: Work = Work()
    inner: "Tape | None" = None


@dataclass
class Tape:
    """Operations in the order in which they run."""

    ops: list[Op] = field(default_factory=list)
    part: str = ""
    parts: list[str] = field(default_factory=list)

    def add(self, op: Op) -> tuple[Buffer, ...]:
        """Appends an operation under the current part's name; its outputs."""
        self.ops.append(op)
        self.parts.append(self.part)
        return op.outputs

    def split(self, source: Buffer, sizes: Sequence[int], *, name: str = "split") -> tuple[Buffer, ...]:
        """Views of `source`, whose gradients are joined into one."""
        views = tuple(Buffer(size, source) for size in sizes)
        return self.add(Op(name, (source,), views))

    def works(self) -> Iterator[tuple[str, Work, Work]]:
        """(name, forward, backward) of every operation; what is checkpointed runs forth twice."""
        for op in self.ops:
            if op.inner is None:
                yield op.name, op.forward, op.backward
                if op.recomputed:
                    yield op.name, Work(), op.forward
                continue
            for name, forward, backward in op.inner.works():
                yield name, forward, backward
                yield name, Work(), forward


def without_gradients(tape: Tape) -> Tape:
    """The same operations where nothing asks for a gradient: nothing is kept, nothing runs backward."""
    ops = [
        replace(op, saves=(), weight_grad=0, held_grad=0, backward_extra=0, backward=Work(), recomputed=False)
        for op in tape.ops
    ]
    return Tape(ops, tape.part, list(tape.parts))


def frozen(tape: Tape) -> Tape:
    """The same operations where gradients pass through, and weights take none."""
    ops = []
    for op in tape.ops:
        backward = op.backward
        if op.weight_grad and backward.kind == "matmul":
            # Half of a projection's backward pass is its weight's gradient.
            backward = replace(backward, flops=backward.flops / 2, moved=backward.moved / 2)
        inner = None if op.inner is None else frozen(op.inner)
        ops.append(replace(op, weight_grad=0, held_grad=0, backward=backward, inner=inner))
    return Tape(ops, tape.part, list(tape.parts))


@dataclass(frozen=True)
class Peak:
    """Bytes beside what is there anyway.

    Attributes:
        size: at the worst moment.
        at: that moment, in words.
        saved: kept when the forward pass ends.
        by_part: the same by part of the tape.
    """

    size: int
    at: str
    saved: int
    by_part: dict[str, int]


def measure(tape: Tape, *, forward_only: bool = False) -> Peak:
    """Runs a tape in the mind: forth, then back.

    Args:
        tape: of one micro-batch.
        forward_only: without gradients nothing is saved.
    """
    run = _Run()
    run.forward(tape, 0, frozenset(), keeps=not forward_only)
    saved = {} if forward_only else _by_part(tape)
    if not forward_only:
        run.backward(tape, 0, frozenset())
    return Peak(run.size, run.at, sum(saved.values()), saved)


def _by_part(tape: Tape) -> dict[str, int]:
    """Saved bytes after the forward pass, by the part that first saves them."""
    found: dict[str, int] = {}
    seen = set(_let_go(tape))
    for op, part in zip(tape.ops, tape.parts, strict=True):
        for storage in {buffer.storage: None for buffer in op.saves}:
            if storage not in seen:
                seen.add(storage)
                found[part] = found.get(part, 0) + storage.size
    return found


def _let_go(tape: Tape) -> frozenset[Buffer]:
    return frozenset(output.storage for op in tape.ops if op.recomputed for output in op.outputs)


@dataclass(eq=False)
class _Grad:
    size: int


@dataclass
class _Run:
    """The worst moment so far."""

    size: int = 0
    at: str = ""

    def note(self, size: int, at: str) -> None:
        if size > self.size:
            self.size, self.at = size, at

    def forward(self, tape: Tape, base: int, outside: frozenset[Buffer], *, keeps: bool) -> None:
        """`outside`: storages that the caller counts in `base`."""
        last: dict[Buffer, int] = {}
        for index, op in enumerate(tape.ops):
            for buffer in (*op.inputs, *op.outputs):
                last[buffer.storage] = index
        let_go = _let_go(tape)
        live: set[Buffer] = set()
        kept: set[Buffer] = set()
        for index, op in enumerate(tape.ops):
            live |= {output.storage for output in op.outputs} - outside
            if keeps:
                kept |= {buffer.storage for buffer in op.saves} - let_go - outside
            held = base + _sizes(live | kept)
            self.note(held + op.forward_extra, f"{op.name}, forward")
            if op.inner is not None:
                self.forward(op.inner, held, outside | live | kept, keeps=False)
            live = {buffer for buffer in live if last[buffer] > index}

    def backward(self, tape: Tape, base: int, outside: frozenset[Buffer]) -> None:
        """The gradients of the last operation's outputs are there."""
        let_go = _let_go(tape)
        uses: dict[Buffer, int] = {}
        for op in tape.ops:
            for storage in {buffer.storage for buffer in op.saves} - outside:
                uses[storage] = uses.get(storage, 0) + 1
        kept = set(uses) - let_go
        grads = {output: _Grad(output.size) for output in tape.ops[-1].outputs if output.needs_grad}
        for op in reversed(tape.ops):
            own = {buffer.storage for buffer in op.saves} - outside
            if not any(output in grads for output in op.outputs):
                # No gradient comes this way.
                _free(own, uses, kept)
                continue
            kept |= own
            if op.inner is not None:
                given = {output: grads.pop(output) for output in op.outputs if output in grads}
                inside = base + _sizes(kept) + _total(grads)
                self.forward(op.inner, inside + _total(given), outside | kept, keeps=True)
                self.backward(op.inner, inside, outside | kept)
                grads |= given
            fresh = _input_grads(op, grads)
            now = (
                base + _sizes(kept) + _total({**grads, **{b: g for b, g in fresh.items() if b not in grads}})
            )
            now += sum(grad.size for buffer, grad in fresh.items() if buffer in grads)
            self.note(now + op.backward_extra + op.weight_grad + op.held_grad, f"{op.name}, backward")
            base += op.held_grad
            for output in op.outputs:
                grads.pop(output, None)
            for buffer, grad in fresh.items():
                # Two gradients of one tensor make a third, their sum.
                grads[buffer] = _Grad(buffer.size) if buffer in grads else grad
            _free(own, uses, kept)


def _free(saved: set[Buffer], uses: dict[Buffer, int], kept: set[Buffer]) -> None:
    """An operation needs what it saved no more."""
    for storage in saved:
        uses[storage] -= 1
        if not uses[storage]:
            kept.discard(storage)


def _input_grads(op: Op, grads: dict[Buffer, _Grad]) -> dict[Buffer, _Grad]:
    inputs = [buffer for buffer in op.inputs if buffer.needs_grad]
    if op.passes_grad:
        shared = next((grads[output] for output in op.outputs if output in grads), None)
        return {buffer: shared or _Grad(buffer.size) for buffer in inputs}
    return {buffer: _Grad(buffer.size) for buffer in inputs}


def _sizes(buffers: set[Buffer]) -> int:
    return sum(buffer.size for buffer in buffers)


def _total(grads: dict[Buffer, _Grad]) -> int:
    return sum(grad.size for grad in set(grads.values()))
