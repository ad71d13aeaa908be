"""Draws row numbers without end, in an order given by seed and epoch alone, and resumes exactly."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_core.data.problems import DataError


def epoch_order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of range(size), the same on every machine and with every version of numpy.

    numpy promises a stable stream only for raw bits of a bit generator, so rows are sorted by such bits.
    """
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    return np.argsort(bits, kind="stable")


class Cursor:
    """Where in an endless sequence of epochs the next row is drawn.

    Invariants: each epoch draws every row exactly once; the sequence of draws does not depend on how many are
    taken at a time, nor on where it is saved and loaded.

    Args:
        size: number of rows, at least 1.
        seed: of the order.
        shuffle: a new order each epoch, or 0, 1, 2, ... always.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool = True) -> None:
        if size < 1:
            raise DataError("there is no row to draw")
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epoch

    @property
    def drawn(self) -> int:
        """Rows drawn since the very beginning."""
        return self._epoch * self._size + self._position

    def take(self, count: int) -> list[int]:
        """The next `count` row numbers; an epoch that ends on the way is followed by the next."""
        taken: list[int] = []
        while len(taken) < count:
            piece = self._order[self._position : self._position + count - len(taken)]
            taken += piece.tolist()
            self._position += len(piece)
            if self._position == self._size:
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs; plain numbers, fit for JSON."""
        return {
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved cursor stood.

        Raises:
            DataError: the state is of other rows, another seed or another order.
        """
        own = self.state_dict()
        for name in ("size", "seed", "shuffle"):
            if state[name] != own[name]:
                raise DataError(
                    f"the saved data cursor has {name} {state[name]}, this run has {own[name]}: resume with "
                    "the data and settings of the saved run"
                )
        if not 0 <= state["position"] < self._size or state["epoch"] < 0:
            raise DataError(
                f"the saved data cursor is damaged: epoch {state['epoch']}, row {state['position']}"
            )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return epoch_order(self._size, self._seed, epoch) if self._shuffle else np.arange(self._size)
