"""Loss: one law for every term, whatever the packing and the layout."""

from relax_core.loss.reducer import LossReducer, LossTerm

__all__ = ["LossReducer", "LossTerm"]
