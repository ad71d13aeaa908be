"""`LossReducer`: every loss term is `sum(weight * value) / Z`, with Z a global count.

Axes: T packed positions of one micro-batch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossTerm:
    """One per-token quantity that the loss is made of.

    Attributes:
        name: names the denominator and the metric.
        value_T: [T] float, with gradient.
        weight_T: [T] float, no gradient; 0 where a position does not count.
        coefficient: factor of the term in the loss. 0 makes it a metric without gradient.
    """

    name: str
    value_T: Tensor
    weight_T: Tensor
    coefficient: float = 1.0


class LossReducer:
    """Turns the terms of one micro-batch into its share of the global loss.

    Z of each term is fixed before the first backward pass, over all micro-batches and all data- and
    context-parallel ranks of an optimizer step. The shares of micro-batches and ranks therefore simply add
    up: the loss and every gradient are the same for one long pack, many packs, padding and any split.

    Args:
        denominators: Z per term name. A term whose Z is 0 has no position that counts anywhere: its share
            is 0 and its gradient exactly zero.
    """

    def __init__(self, denominators: Mapping[str, float]) -> None:
        for name, count in denominators.items():
            if not count >= 0:
                raise ValueError(
                    f"the denominator of loss term {name!r} is {count}: it must be a count of at least 0"
                )
        self._denominators = dict(denominators)

    def reduce(self, terms: Iterable[LossTerm]) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the loss, and of each term before its coefficient (detached).

        Returns:
            (loss, shares): float32 or float64 scalars (that of the values). Shares summed over micro-batches
            and ranks are the terms' global means.
        """
        loss: Tensor | None = None
        shares: dict[str, Tensor] = {}
        for term in terms:
            share = self._share(term)
            shares[term.name] = share.detach()
            if term.coefficient != 0:
                scaled = share * term.coefficient
                loss = scaled if loss is None else loss + scaled
        if loss is None:
            raise ValueError("no loss term has a coefficient other than 0: there is nothing to train on")
        return loss, shares

    def _share(self, term: LossTerm) -> Tensor:
        if term.name not in self._denominators:
            raise ValueError(
                f"loss term {term.name!r} has no denominator; known: {sorted(self._denominators)}"
            )
        value_T = term.value_T if term.value_T.dtype == torch.float64 else term.value_T.float()
        # A masked position may hold inf or NaN (log of an impossible token): where, not times, keeps it out.
        counted_T = torch.where(term.weight_T != 0, value_T, value_T.new_zeros(()))
        total = (counted_T * term.weight_T.to(value_T.dtype)).sum()
        return total / max(self._denominators[term.name], torch.finfo(value_T.dtype).tiny)
