"""A model's weight map: a table of rows, and what follows from it (import, export, shapes)."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from relax_bridge.checkpoint import Checkpoint
from relax_bridge.errors import BridgeError, CoverageError, MtpMismatchError, Problems
from relax_bridge.table import Entry, Row
from relax_bridge.transforms import Shape

TRUNK = "decoder.layers."
_MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ModelMap:
    """The bijection between one model's Hugging Face and Megatron tensors.

    Attributes:
        model: the `model_type` it was built for.
        rows: the table.
        passthrough: prefixes of Hugging Face names the trainer does not hold (a vision tower); they are
            neither imported nor refused, and `export_tensors(like=...)` returns them untouched.
        mtp_layers: the number of multi-token-prediction layers of the model.
    """

    model: str
    rows: tuple[Row, ...]
    passthrough: tuple[str, ...] = ()
    mtp_layers: int = 0

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The table's concrete tensors, layer by layer; this order is the order of every stream."""
        found: list[Entry] = []
        for head, rows in groupby(self.rows, key=lambda row: row.megatron.partition("{i}")[:2]):
            block = [entry for row in rows for entry in row.entries()]
            if head[1]:
                block.sort(key=lambda entry: entry.layer or 0)
            found += block
        _check_bijective(found)
        return tuple(found)

    @cached_property
    def trunk_layers(self) -> int:
        """The number of layers of the trunk, those of multi-token prediction not counted."""
        return 1 + max(
            (i for row in self.rows if row.megatron.startswith(TRUNK) for i in row.at["i"]), default=-1
        )

    @cached_property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return not any(row.megatron.startswith("output_layer.") for row in self.rows)

    def megatron_shapes(self) -> dict[str, Shape]:
        """Megatron name -> full shape, in stream order."""
        return {entry.megatron: entry.megatron_shape for entry in self.entries}

    def hf_shapes(self) -> dict[str, Shape]:
        """Hugging Face name -> shape, in stream order (without the names passed through)."""
        return {n: s for entry in self.entries for n, s in zip(entry.hf, entry.hf_shapes, strict=True)}

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuses a checkpoint that is not exactly this model.

        Raises:
            MtpMismatchError: another number of MTP layers, naming both numbers.
            CoverageError: names every missing, extra, mis-shaped and quantised tensor.
        """
        stored = mtp_layers_of(checkpoint.names)
        if stored != self.mtp_layers:
            raise MtpMismatchError(
                f"{checkpoint.path} holds {stored} MTP layers and the model has {self.mtp_layers}. Set "
                f"mtp_num_hidden_layers to {stored} in its config.json, build the model (and model_map) with "
                f"mtp_layers={stored}, use a checkpoint with {self.mtp_layers}, or choose mtp.init: copy, "
                "random or truncate. (transformers drops `mtp.*` when it saves a model.)"
            )
        problems = self.problems(checkpoint)
        if problems:
            hint = "" if not problems.unsupported else "Dequantise the checkpoint to bfloat16 first."
            raise CoverageError(f"{checkpoint.path} does not fit the {self.model} table", problems, hint)

    def problems(self, checkpoint: Checkpoint) -> Problems:
        """What keeps `checkpoint` from being exactly this model, without raising."""
        shapes = self.hf_shapes()
        present = [name for name in checkpoint.names if not self.passes_through(name)]
        names = set(present)
        quantised = [f"{n}: {checkpoint.stored_dtype(n)}" for n in present if checkpoint.dtype(n) is None]
        for entry in self.entries:
            if len(entry.hf) > 1:
                dtypes = {checkpoint.stored_dtype(name) for name in entry.hf if name in names}
                if len(dtypes) > 1:
                    quantised.append(f"{', '.join(entry.hf)}: parts of one tensor as {sorted(dtypes)}")
        return Problems(
            missing=tuple(name for name in shapes if name not in names),
            extra=tuple(name for name in present if name not in shapes),
            mis_shaped=tuple(
                f"{name}: {list(checkpoint.shape(name))}, the table says {list(shapes[name])}"
                for name in present
                if name in shapes and checkpoint.shape(name) != shapes[name]
            ),
            unsupported=tuple(quantised),
        )

    def passes_through(self, hf_name: str) -> bool:
        """Whether a Hugging Face tensor is left alone (see `passthrough`)."""
        return hf_name.startswith(self.passthrough) if self.passthrough else False

    def import_tensors(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """Megatron name and full tensor, in stream order, each in its stored dtype.

        Everything is checked before the first tensor is read; one fused tensor is in memory at a time.

        Raises:
            MtpMismatchError, CoverageError: see `check`.
        """
        self.check(checkpoint)
        return self._read(checkpoint)

    def _read(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        for entry in self.entries:
            yield entry.megatron, entry.transform.forward([read_part(checkpoint, entry, n) for n in entry.hf])

    def export_tensors(
        self,
        tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        like: Checkpoint | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and tensor, in stream order.

        Args:
            tensors: full Megatron tensors. From a mapping everything is checked before the first yield. From
                an iterable, tensors that come before their turn are held back: feed them in the order of
                `megatron_shapes()` and none is.
            like: the source checkpoint. With it each tensor is cast to the source's dtype and the tensors
                the trainer does not hold (a vision tower) follow at the end, untouched.

        Raises:
            CoverageError: names what is missing, extra, repeated or mis-shaped.
        """
        if isinstance(tensors, Mapping):
            self._check_megatron({name: tuple(x.shape) for name, x in tensors.items()})
            stream: Iterable[tuple[str, Tensor]] = ((e.megatron, tensors[e.megatron]) for e in self.entries)
        else:
            stream = tensors
        return self._write(self._in_turn(stream), like)

    def _in_turn(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Entry, Tensor]]:
        """Brings a stream into table order and checks it as it goes."""
        shapes = self.megatron_shapes()
        waiting: dict[str, Tensor] = {}
        seen: dict[str, Shape] = {}
        turn = iter(self.entries)
        entry = next(turn, None)
        for name, tensor in tensors:
            if name in seen:
                raise CoverageError("tensors to export", Problems(extra=(f"{name}: given twice",)))
            seen[name] = tuple(tensor.shape)
            if shapes.get(name) != seen[name]:
                # Stops at the first wrong one: what follows may already be on its way to an engine.
                self._check_megatron(seen, complete=False)
            waiting[name] = tensor
            while entry is not None and entry.megatron in waiting:
                yield entry, waiting.pop(entry.megatron)
                entry = next(turn, None)
        self._check_megatron(seen)

    def _write(
        self, tensors: Iterable[tuple[Entry, Tensor]], like: Checkpoint | None
    ) -> Iterator[tuple[str, Tensor]]:
        stacks: dict[str, tuple[Tensor, set[int]]] = {}
        for entry, tensor in tensors:
            parts = entry.transform.inverse(tensor)
            for name, shape, part in zip(entry.hf, entry.hf_shapes, parts, strict=True):
                if entry.stack_index is None:
                    yield name, _cast(part, like, name)
                    continue
                if name not in stacks:
                    stacks[name] = part.new_empty(shape), set(range(shape[0]))
                stack, left = stacks[name]
                stack[entry.stack_index] = part.detach()
                left.remove(entry.stack_index)
                if not left:
                    yield name, _cast(stacks.pop(name)[0], like, name)
        if like is not None:
            for name in like.names:
                if self.passes_through(name):
                    yield name, like.tensor(name)

    def _check_megatron(self, given: Mapping[str, Shape], *, complete: bool = True) -> None:
        shapes = self.megatron_shapes()
        problems = Problems(
            missing=tuple(name for name in shapes if name not in given) if complete else (),
            extra=tuple(name for name in given if name not in shapes),
            mis_shaped=tuple(
                f"{name}: {list(shape)}, the table says {list(shapes[name])}"
                for name, shape in given.items()
                if name in shapes and shapes[name] != shape
            ),
        )
        if problems:
            raise CoverageError(f"tensors to export do not fit the {self.model} table", problems)


def mtp_layers_of(names: Iterable[str]) -> int:
    """The number of MTP layers a checkpoint's names speak of."""
    found = [match.group(1) for match in map(_MTP_LAYER.match, names) if match]
    return 1 + max(map(int, found)) if found else 0


def read_part(checkpoint: Checkpoint, entry: Entry, name: str) -> Tensor:
    """What `entry` takes of a Hugging Face tensor: all of it, or its place in a stack."""
    if entry.stack_index is None:
        return checkpoint.tensor(name)
    return checkpoint.slice(name, slice(entry.stack_index, entry.stack_index + 1))[0]


def _cast(x: Tensor, like: Checkpoint | None, hf: str) -> Tensor:
    dtype: torch.dtype | None = like.dtype(hf) if like is not None and hf in like else None
    return x if dtype is None else x.to(dtype)


def _check_bijective(entries: Iterable[Entry]) -> None:
    """Each Megatron tensor once; each Hugging Face tensor whole once, or each place of its stack once."""
    names: list[str] = []
    whole: list[str] = []
    stacked: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for row, megatron, hf, _, expert in entries:
        names.append(megatron)
        if row.stacked is None:
            whole += hf
            continue
        for name, shape in zip(hf, row.hf_shapes, strict=True):
            stacked.setdefault(name, []).append(-1 if expert is None else expert)
            sizes[name] = shape[0]
    twice = [*_repeated(names), *_repeated(whole), *(stacked.keys() & set(whole))]
    twice += [name for name, places in stacked.items() if len(set(places)) < len(places)]
    if twice:
        raise BridgeError(f"the table covers {twice[0]!r} twice")
    for name, places in stacked.items():
        if set(places) != set(range(sizes[name])):
            raise BridgeError(f"the table does not cover the whole of {name!r}")


def _repeated(names: list[str]) -> list[str]:
    return (
        [name for name, count in Counter(names).items() if count > 1] if len(set(names)) < len(names) else []
    )
