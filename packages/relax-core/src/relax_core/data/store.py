"""Examples in a file, read when they are asked for; of all but the first, memory holds only where they lie.

N examples.
"""

import io
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from relax_core.data.examples import Example
from relax_core.data.picture_maker import PictureMaker
from relax_core.data.problems import DataError

E = TypeVar("E", bound=Example)

_HELD = 16 << 20
_BUFFER = 1 << 20


class ExampleFile(Generic[E]):
    """A file without a name, which ends with whoever reads it; one thread writes, any may read.

    It lies in the folder for temporary files (the environment's TMPDIR), and is made when the examples exceed
    what is held in memory.
    """

    def __init__(self) -> None:
        self._held: dict[int, bytes] = {}
        self._end = 0
        self._file: IO[bytes] | None = None
        self._file_begins = 0
        # What made the pictures of all examples is the same, and is not written with each.
        self._maker: PictureMaker | None = None

    def keep(self, examples: Iterable[E]) -> "Examples[E]":
        """Writes examples, one at a time.

        Raises:
            DataError: the disk is full.
        """
        places: list[int] = []
        lengths: list[int] = []
        for example in examples:
            written = io.BytesIO()
            pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
            pickler.persistent_id = self._name_of  # type: ignore[method-assign]
            pickler.dump(example)
            places.append(self._end)
            lengths.append(self._write(written.getvalue()))
        if self._file is not None:
            with _room():
                self._file.flush()
        return Examples(self, np.array([places, lengths], dtype=np.int64))

    def read(self, place: int, length: int) -> E:
        """The example that was written there; a new object each time."""
        written = self._held.get(place)
        if written is None:
            assert self._file is not None
            written = os.pread(self._file.fileno(), length, place - self._file_begins)
        unpickler = pickle.Unpickler(io.BytesIO(written))
        unpickler.persistent_load = self._named  # type: ignore[method-assign]
        example: E = unpickler.load()
        return example

    def _write(self, example: bytes) -> int:
        if self._file is None and self._end + len(example) <= _HELD:
            self._held[self._end] = example
        else:
            with _room():
                if self._file is None:
                    self._file = tempfile.TemporaryFile(prefix="relax-examples-", buffering=_BUFFER)  # noqa: SIM115
                    self._file_begins = self._end
                self._file.write(example)
        self._end += len(example)
        return len(example)

    def _name_of(self, value: Any) -> str | None:
        if not isinstance(value, PictureMaker):
            return None
        self._maker = self._maker or value
        return "maker"

    def _named(self, _: str) -> Any:
        return self._maker


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"tokenised data cannot be kept in {tempfile.gettempdir()}: {error.strerror or error}. Set the "
            "environment's TMPDIR to a folder with more room"
        ) from error


class Examples(Sequence[E]):
    """Examples of a file, in an order of their own; each is read whenever it is asked for.

    Args:
        file: where they are.
        spans_2N: place and length of each.
    """

    def __init__(self, file: ExampleFile[E], spans_2N: NDArray[np.int64]) -> None:
        self._file = file
        self._spans_2N = spans_2N

    def __len__(self) -> int:
        return int(self._spans_2N.shape[1])

    @overload
    def __getitem__(self, number: int) -> E: ...
    @overload
    def __getitem__(self, number: slice) -> "Examples[E]": ...
    def __getitem__(self, number: int | slice) -> "E | Examples[E]":
        if isinstance(number, slice):
            return Examples(self._file, self._spans_2N[:, number])
        place, length = self._spans_2N[:, number].tolist()
        return self._file.read(place, length)

    def chosen(self, wanted_N: ArrayLike) -> "Examples[E]":
        """Those for which `wanted_N` is true, in the same order."""
        return Examples(self._file, self._spans_2N[:, np.asarray(wanted_N, dtype=np.bool_)])

    def followed_by(self, others: Sequence["Examples[E]"]) -> "Examples[E]":
        """These and then others of the same file."""
        return Examples(self._file, np.concatenate([one._spans_2N for one in (self, *others)], axis=1))
