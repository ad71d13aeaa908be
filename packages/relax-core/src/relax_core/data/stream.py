"""Examples drawn without end, resumable to the very next one."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from relax_core.data.cursor import Cursor
from relax_core.data.examples import Example
from relax_core.data.problems import DataError

E = TypeVar("E", bound=Example)


class ExampleStream(Generic[E]):
    """Draws examples in the order of a `Cursor`.

    Args:
        examples: at least one.
        seed: of the order.
        shuffle: a new order each epoch, or the examples' own.
    """

    def __init__(self, examples: Sequence[E], *, seed: int, shuffle: bool = True) -> None:
        self._examples = examples
        self._cursor = Cursor(len(examples), seed=seed, shuffle=shuffle)
        self._fingerprint = fingerprint(examples)

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._cursor.epoch

    @property
    def drawn(self) -> int:
        """Examples drawn since the very beginning."""
        return self._cursor.drawn

    def take(self, count: int) -> list[E]:
        """The next `count` examples."""
        return [self._examples[number] for number in self._cursor.take(count)]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, fit for JSON."""
        return {**self._cursor.state_dict(), "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved stream stood.

        Raises:
            DataError: the examples, the seed or the order are not those of the saved stream.
        """
        self._cursor.load_state_dict(state)
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the training data have changed since the run was saved (other tokens or answers in as many "
                "rows): resume with the data of the saved run"
            )


def fingerprint(examples: Sequence[Example]) -> str:
    """A digest of all token ids and answers, in order; places do not count, so that files can be moved."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example.ids).to_bytes(8, "little"))
        digest.update(example.ids.astype("<i4").tobytes())
        digest.update(repr(getattr(example, "answer", None)).encode())
        mask = getattr(example, "loss_mask", None)
        digest.update(b"" if mask is None else mask.tobytes())
        for picture in getattr(example, "pictures", ()):
            digest.update(picture.kept.key.encode())
    return digest.hexdigest()
