"""From chunks of rows to examples, in this process or in workers: the same examples in the same order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from relax_core.data.examples import Example
from relax_core.data.length import LengthRule
from relax_core.data.problems import BadRow, RowError
from relax_core.data.rows import Row

E = TypeVar("E", bound=Example)
Made = TypeVar("Made", covariant=True)

Chunk = Sequence[Row | BadRow]


class Builder(Protocol[Made]):
    """What makes examples of rows; drafts are the builder's own business. Fit for pickle."""

    length: LengthRule

    def draft(self, row: Row) -> list[Any]:
        """A row's examples before they are tokenised."""
        ...

    def finish(self, drafts: list[Any]) -> Iterator[Made | BadRow]:
        """Tokenises drafts."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared(Generic[E]):
    """What a chunk of rows gave.

    Attributes:
        bad_rows: those that cannot be used.
        examples: in the order of rows.
        left_out, cut: examples above the longest length.
    """

    bad_rows: list[BadRow]
    examples: list[E]
    left_out: int
    cut: int


Preparation = Callable[[Iterable[Chunk]], Iterator[Prepared[E]]]


def prepare(builder: Builder[E], chunk: Chunk) -> Prepared[E]:
    """Drafts every row, then tokenises all of them together."""
    bad_rows: list[BadRow] = []
    examples: list[E] = []
    drafts: list[Any] = []
    left_out, cut = builder.length.left_out, builder.length.cut
    for row in chunk:
        if isinstance(row, BadRow):
            bad_rows.append(row)
            continue
        try:
            drafts += builder.draft(row)
        except RowError as error:
            bad_rows.append(BadRow(row.place, str(error)))
    for made in builder.finish(drafts):
        if isinstance(made, BadRow):
            bad_rows.append(made)
        else:
            examples.append(made)
    return Prepared(bad_rows, examples, builder.length.left_out - left_out, builder.length.cut - cut)


@contextmanager
def preparation(builder: Builder[E], workers: int) -> Iterator[Preparation[E]]:
    """A function that prepares chunks in order, in `workers` processes; 0 takes this one.

    Processes end with the `with` block, whatever ends it.
    """
    if workers == 0:
        yield lambda chunks: (prepare(builder, chunk) for chunk in chunks)
        return
    from relax_core.data.workers import Workers

    with Workers(builder, workers) as started:
        yield started.prepare
