"""`Sequences`: sums over whole completions, wherever their tokens lie.

Axes: T tokens of this rank in one micro-batch, N sequences of the micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def _own(total_N: "Tensor") -> "Tensor":
    return total_N


@dataclass(frozen=True)
class Sequences:
    """Which sequence each token belongs to.

    A sequence is whole in its micro-batch; under context parallelism its tokens lie on several ranks, all of
    which must call the same sums in the same order.

    Attributes:
        index_T: int64 [T], 0 to N - 1.
        count: N.
        add_over_context: adds [N] numbers over the context-parallel ranks.
    """

    index_T: "Tensor"
    count: int
    add_over_context: "Callable[[Tensor], Tensor]" = _own

    def sum(self, value_T: "Tensor") -> "Tensor":
        """At each token, the sum over its whole sequence: [T] -> [T], without gradient; added in float64."""
        value_T = value_T.detach()
        total_N = value_T.double().new_zeros(self.count).index_add(0, self.index_T, value_T.double())
        return self.add_over_context(total_N)[self.index_T].to(value_T.dtype)

    def mean(self, value_T: "Tensor") -> "Tensor":
        """At each token, the mean over its whole sequence: [T] -> [T], without gradient."""
        return self.sum(value_T) / self.sum(value_T.new_ones(value_T.shape))
