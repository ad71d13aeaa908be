"""What one optimizer step measured."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol


class Late(Protocol):
    """Numbers that may still be on the device."""

    @property
    def ready(self) -> bool:
        """Whether reading would not wait for the device."""
        ...

    def read(self) -> dict[str, float]:
        """The numbers by name."""
        ...


class StepMetrics:
    """The same on every rank, and plain numbers once they are pickled.

    Attributes:
        tokens: tokens trained on, prompts included.
        flops: floating-point operations of the forward and backward passes of the whole mini-batch, as the
            model needs them: two for each multiplication of `sample_cost`, three passes' worth, nothing for
            what is computed again.

    Args:
        values: the numbers, or where they come from; see `values`.
        tokens, flops: see above.
    """

    def __init__(self, values: Mapping[str, float] | Late, tokens: int, flops: float = 0.0) -> None:
        self._values = values
        self.tokens = tokens
        self.flops = flops

    @property
    def ready(self) -> bool:
        """Whether `values` would not wait for the device."""
        return isinstance(self._values, Mapping) or self._values.ready

    @cached_property
    def values(self) -> dict[str, float]:
        """Global means of every loss term, maxima, `loss`, `grad_norm`, `lr`, and per draft depth
        `mtp_loss_<k>` and `mtp_acceptance_<k>`; with experts, what `LoadBalance.metrics` says.

        The first look waits until the device has finished the gradients of the step. Until then the host may
        queue the next steps.

        Raises:
            NonFiniteGradientError: the gradient held inf or NaN; the step was not taken.
        """
        return dict(self._values if isinstance(self._values, Mapping) else self._values.read())

    def __reduce__(self) -> tuple[Callable[..., "StepMetrics"], tuple[Any, ...]]:
        """Only numbers travel to other processes."""
        return StepMetrics, (self.values, self.tokens, self.flops)
