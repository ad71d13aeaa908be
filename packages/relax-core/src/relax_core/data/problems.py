"""Rows that cannot be used: named by place and reason, counted, and refused above a limit."""

import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

_SHOWN = 5


class DataError(ValueError):
    """The data cannot be used as they are: says what was found, and what to change."""


class RowError(DataError):
    """One row cannot be used; the reason, without its place."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        place: file and line; for Parquet and the hub, the row counted from 1.
        reason: what is wrong with it.
    """

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass
class BadRows:
    """Counts the bad rows of one source and keeps the first of them.

    Attributes:
        limit: how many are skipped before the source is refused.
        kept: the first bad rows, `limit` of them or a few more.
        total: how many there were.
    """

    limit: int
    kept: list[BadRow] = field(default_factory=list)
    total: int = 0

    def add(self, row: BadRow) -> None:
        """Counts one bad row."""
        self.total += 1
        if len(self.kept) < max(self.limit, _SHOWN):
            self.kept.append(row)

    def settle(self, source: str) -> tuple[BadRow, ...]:
        """Ends a source: refuses it, or says what was skipped.

        Raises:
            DataError: there were more than `limit` bad rows; the first ones are listed.
        """
        if self.total > self.limit:
            raise DataError(
                f"{source}: {self.total} bad {_rows(self.total)}, above data.max_bad_rows = {self.limit}: "
                f"correct them, or raise the limit to skip them.\n{self._listing()}"
            )
        if self.total:
            logger.warning(
                "%s: skipped %d bad %s.\n%s", source, self.total, _rows(self.total), self._listing()
            )
        return tuple(self.kept)

    def _listing(self) -> str:
        lines = [f"  {row}" for row in self.kept[:_SHOWN]]
        if self.total > len(lines):
            lines.append(f"  ... and {self.total - len(lines)} more")
        return "\n".join(lines)


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"
