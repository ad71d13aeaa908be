"""Cache of a batch of rows, kept by the engine and filled by the transformers model.

N rows, G key/value heads, S slots (width used + room), D head dim, C conv channels, W conv width,
U value heads, K key dim, V value dim. Rows are left-padded: the last token of every row is in the last used
slot.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

SUPPORTED_LAYERS = ("full_attention", "linear_attention")


class KeyValueLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one attention layer, written in place into slots allocated ahead."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized: bool = False
        self.width = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first update brings the tensors."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [N, G, new, D] and return all used slots."""
        new = key_states.shape[2]
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            self._make_room(self.width + new)
            self.keys[:, :, self.width : self.width + new] = key_states
            self.values[:, :, self.width : self.width + new] = value_states
        self.width += new
        return self.keys[:, :, : self.width], self.values[:, :, : self.width]

    def _make_room(self, slots: int) -> None:
        have = self.keys.shape[2]
        if slots > have:
            room = max(slots, have + have // 2 + 8) - have
            self.keys = F.pad(self.keys, (0, 0, 0, room))
            self.values = F.pad(self.values, (0, 0, 0, room))

    def select(self, index_N: Tensor, drop: int, room: int) -> None:
        """Keep these rows, without their first ``drop`` slots, with ``room`` free slots."""
        used = self.width - drop
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            fresh = old.new_empty(len(index_N), old.shape[1], used + room, old.shape[3])
            torch.index_select(old[:, :, drop : self.width], 0, index_N, out=fresh[:, :, :used])
            setattr(self, name, fresh)
        self.width = used

    def merge(self, other: "KeyValueLayer") -> None:
        """Put ``other``'s rows below; the narrower of the two is padded on the left."""
        width = max(self.width, other.width)
        for name in ("keys", "values"):
            parts = [
                F.pad(getattr(layer, name)[:, :, : layer.width], (0, 0, width - layer.width, 0))
                for layer in (self, other)
            ]
            setattr(self, name, torch.cat(parts))
        self.width = width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a query of this length will see, and the offset of the first."""
        return self.width + query_length, 0

    def get_seq_length(self) -> int:
        """Used slots."""
        return self.width

    def get_max_cache_shape(self) -> int:
        """No bound."""
        return -1


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """Convolution tail [N, C, W] and recurrent state [N, U, K, V] of one delta-net layer.

    The tail is a view of [W, N, C] memory, so that a step of the convolution reads and shifts whole planes.
    The recurrent state keeps the dtype in which it was computed (float32, also for a bfloat16 model).
    """

    def lazy_initialization(
        self, conv_states: Tensor | None = None, recurrent_states: Tensor | None = None
    ) -> None:
        """Nothing: the first update brings the tensors."""

    def update_conv_state(self, conv_states: Tensor, **kwargs: Any) -> Tensor:
        """Take the tail of a prefill."""
        self._set_tail(conv_states.permute(2, 0, 1).contiguous())
        self.has_previous_state = self.is_conv_states_initialized = True
        return self.conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, **kwargs: Any) -> Tensor:
        """Take the state after a prefill or a step (which may be the tensor already held)."""
        self.recurrent_states = recurrent_states
        self.is_recurrent_states_initialized = True
        return self.recurrent_states

    def _set_tail(self, tail_WNC: Tensor) -> None:
        self.conv_states = tail_WNC.permute(1, 2, 0)

    def select(self, index_N: Tensor, drop: int, room: int) -> None:
        """Keep these rows."""
        self._set_tail(self.conv_states.permute(2, 0, 1).index_select(1, index_N))
        self.recurrent_states = self.recurrent_states.index_select(0, index_N)

    def merge(self, other: "StateLayer") -> None:
        """Put ``other``'s rows below."""
        self._set_tail(torch.cat([layer.conv_states.permute(2, 0, 1) for layer in (self, other)], dim=1))
        self.recurrent_states = torch.cat([self.recurrent_states, other.recurrent_states])


class BatchCache(Cache):  # type: ignore[misc]
    """One layer cache per model layer, with the row operations that a changing batch needs."""

    def __init__(self, layer_types: tuple[str, ...]) -> None:
        super().__init__(
            layers=[StateLayer() if kind == "linear_attention" else KeyValueLayer() for kind in layer_types]
        )

    def select(self, index_N: Tensor, *, drop: int, room: int) -> None:
        """Keep these rows (one may come several times), forget the first ``drop`` slots, make ``room``."""
        for layer in self.layers:
            layer.select(index_N, drop, room)

    def merge(self, other: "BatchCache") -> None:
        """Put the rows of ``other`` below these."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.merge(theirs)
