"""The mini-batches trained since the last checkpoint, on disk: a trainer that died is brought up by them."""

import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from relax_core.cluster.folders import own_folder


class Journal:
    """Remembers calls in order; `close` removes the files, and those that killed processes left.

    Attributes:
        base: the checkpoint on which the calls were made; None for the weights that the run starts from.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(own_folder("relax-journal-"))
        self._first = self._count = 0
        self._marked: tuple[Path, int] | None = None
        self.base: Path | None = None

    def add(self, call: tuple[Any, ...]) -> None:
        """Remembers a call that has been made."""
        with self._file(self._count).open("wb") as file:
            pickle.dump(call, file)
        self._count += 1

    def mark(self, base: Path) -> None:
        """A checkpoint `base` of all calls so far is on its way to the disk."""
        self._marked = base, self._count

    def confirm(self) -> None:
        """The checkpoint that was marked is whole: forgets what it holds."""
        if self._marked is None:
            return
        self.base, end = self._marked
        self._marked = None
        for number in range(self._first, end):
            self._file(number).unlink()
        self._first = end

    def withdraw(self) -> None:
        """The checkpoint that was marked will never be whole."""
        self._marked = None

    def calls(self) -> Iterator[tuple[Any, ...]]:
        """What was made on `base`, oldest first."""
        for number in range(self._first, self._count):
            with self._file(number).open("rb") as file:
                yield pickle.load(file)

    def __len__(self) -> int:
        return self._count - self._first

    def close(self) -> None:
        """Removes the files."""
        self._stack.close()

    def _file(self, number: int) -> Path:
        return self._folder / str(number)
