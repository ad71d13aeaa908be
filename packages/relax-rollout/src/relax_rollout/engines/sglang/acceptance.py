"""Acceptance of drafts over many completions, and whether drafting pays."""

import logging

from relax_rollout.requests import DraftCounts

log = logging.getLogger(__name__)


class Acceptance:
    """Totals since :meth:`take` was last called.

    Args:
        min_rate: acceptance rate below which drafting does not pay; None where nothing is drafted.
        window: verifications between two judgements.
    """

    def __init__(self, min_rate: float | None, window: int) -> None:
        self.pays = True
        self._min_rate = min_rate
        self._size = window
        self._taken = DraftCounts()
        self._window = DraftCounts()

    def add(self, counts: DraftCounts | None) -> None:
        """Count a completion."""
        if counts is None:
            return
        self._taken += counts
        self._window += counts
        if self._min_rate is not None and self._window.steps >= self._size:
            pays = self._window.rate >= self._min_rate
            if not pays and self.pays:
                log.warning(
                    "drafts do not pay: %.1f %% of %d were accepted, below the %.0f %% of min_draft_rate",
                    100 * self._window.rate,
                    self._window.drafted,
                    100 * self._min_rate,
                )
            self.pays, self._window = pays, DraftCounts()

    def take(self) -> DraftCounts:
        """The totals; counting begins anew."""
        taken, self._taken = self._taken, DraftCounts()
        return taken
