"""Probability ratios that stay finite.

Axes: T packed tokens.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within +- this before they are exponentiated, in nats."""


def bounded_ratio(log_ratio_T: "Tensor") -> "Tensor":
    """exp of [T] log-ratios held within +-`MAX_LOG_RATIO`; beyond it there is no gradient."""
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
