"""Examples of several sources, drawn in fixed shares."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from relax_core.data.examples import Example
from relax_core.data.problems import DataError
from relax_core.data.stream import ExampleStream

E = TypeVar("E", bound=Example)


class MixedStream(ExampleStream[E]):
    """Draws from sources in proportion to their weights.

    Invariant: after n draws a source of share s has given s * n examples, off by at most the number of
    sources; each source is drawn in its own order, epoch after epoch.

    Args:
        sources: (examples, weight above 0), at least one.
        seed: of every source's order.
        shuffle: see `ExampleStream`.
    """

    def __init__(
        self, sources: Sequence[tuple[Sequence[E], float]], *, seed: int, shuffle: bool = True
    ) -> None:
        total = sum(weight for _, weight in sources)
        self._shares = [weight / total for _, weight in sources]
        self._streams = [ExampleStream(examples, seed=seed, shuffle=shuffle) for examples, _ in sources]

    @property
    def epoch(self) -> int:
        """Epochs that every source has completed."""
        return min(stream.epoch for stream in self._streams)

    @property
    def drawn(self) -> int:
        """Examples drawn since the very beginning."""
        return sum(stream.drawn for stream in self._streams)

    def take(self, count: int) -> list[E]:
        """The next `count` examples, each of the source that is most behind its share."""
        taken: list[E] = []
        for _ in range(count):
            due = self.drawn + 1
            behind = [share * due - s.drawn for share, s in zip(self._shares, self._streams, strict=True)]
            taken += self._streams[behind.index(max(behind))].take(1)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, fit for JSON."""
        return {"shares": self._shares, "sources": [stream.state_dict() for stream in self._streams]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved stream stood.

        Raises:
            DataError: sources, shares, examples, seed or order are not those of the saved stream.
        """
        if state.get("shares") != self._shares:
            raise DataError(
                f"the saved run drew from sources in shares {state.get('shares')}, this one in "
                f"{self._shares}: resume with the data.mixture of the saved run"
            )
        for stream, saved in zip(self._streams, state["sources"], strict=True):
            stream.load_state_dict(saved)
