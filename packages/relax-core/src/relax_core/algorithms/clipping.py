"""The clipped policy loss.

Axes: T packed tokens.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Clipped(NamedTuple):
    """Loss per token, and where a clip or a mask took the gradient away."""

    loss_T: "Tensor"
    clipped_T: "Tensor"
    dual_clipped_T: "Tensor"


def clipped_policy_loss(
    ratio_T: "Tensor",
    advantage_T: "Tensor",
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Clipped:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); with dual_clip c, at most -c A where A < 0.

    PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7); separate bounds from DAPO (arXiv 2503.14476,
    section 3.1); dual clip from Ye et al. 2020 (arXiv 1912.09729, "dual-clip PPO").

    Args:
        ratio_T: [T] float, probability of the token now over that when it was sampled, with gradient.
        advantage_T: [T] float, no gradient.
        clip_low: distance below 1 to which the ratio counts where A < 0.
        clip_high: distance above 1 to which the ratio counts where A > 0.
        dual_clip: largest ratio that counts where A < 0, above 1; None is off.

    Returns:
        loss_T [T] float; clipped_T and dual_clipped_T [T] bool. A clipped token has no gradient.
    """
    plain_T = -ratio_T * advantage_T
    bounded_T = -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantage_T
    loss_T = plain_T.maximum(bounded_T)
    clipped_T = bounded_T > plain_T
    dual_clipped_T = clipped_T.new_zeros(clipped_T.shape)
    if dual_clip is not None:
        limit_T = -dual_clip * advantage_T
        dual_clipped_T = (advantage_T < 0) & (loss_T > limit_T)
        loss_T = limit_T.where(dual_clipped_T, loss_T)
    return Clipped(loss_T, clipped_T, dual_clipped_T)


def unclipped(loss_T: "Tensor") -> Clipped:
    """A loss [T] that no clip touches."""
    nowhere_T = loss_T.detach() != loss_T.detach()
    return Clipped(loss_T, nowhere_T, nowhere_T)
