"""What one trainer rank holds of a model and of a row: sizes only.

Letters as in the model: T tokens of this context-parallel rank, D hidden, F inside a feed-forward, H query
heads, G key/value heads, E features of a head; of the delta net H key and U value heads, K and V their
features, C convolved channels; R rows that this rank's experts receive.
"""

from dataclasses import dataclass
from math import ceil

from relax_core.device.parallel import ParallelConfig
from relax_core.model.config import Qwen35Config
from relax_core.model.context.choose import AttentionWay, DeltaWay, choose_attention, choose_delta

CHUNK = 64
"""Tokens of a chunk of the delta rule (`relax_kernels`)."""


@dataclass(frozen=True)
class Local:
    """Sizes on one rank.

    Attributes:
        model: the whole model.
        parallel: the layout.
        row: tokens of a packed row that the context-parallel ranks share, padding included.
        sample: tokens of a sample in it: attention and the delta rule see no further.
        even: whether all samples have one length, for which attention has a faster form.
        scored: tokens of this rank's part that carry loss.
        activation: bytes of an activation's number.
        attention_way, delta_way: how context-parallel ranks share a row.
    """

    model: Qwen35Config
    parallel: ParallelConfig
    row: int
    sample: int
    even: bool
    scored: int
    activation: int
    attention_way: AttentionWay
    delta_way: DeltaWay

    @classmethod
    def of(
        cls,
        model: Qwen35Config,
        parallel: ParallelConfig,
        *,
        tokens: int,
        activation: int,
        sample: int | None = None,
        even: bool = False,
        scored: float = 1.0,
    ) -> "Local":
        """A rank's share of rows of `tokens` tokens.

        Args:
            model: sizes of the whole model.
            parallel: the layout.
            tokens: of a packed row.
            activation: bytes of a number.
            sample: tokens of a sample; the row is one if None.
            even: whether all samples have that length.
            scored: share of the tokens that carry loss.

        Raises:
            ValueError: the heads do not allow the way of context parallelism that was asked for.
        """
        sizes = {"tensor": parallel.tensor, "context": parallel.context}
        row = ceil(tokens / parallel.row_multiple) * parallel.row_multiple
        return cls(
            model,
            parallel,
            row,
            min(row, sample or row),
            even,
            ceil(row * scored / parallel.context),
            activation,
            choose_attention(parallel.context_attention, heads=model.attention_heads, **sizes).way,
            choose_delta(
                parallel.context_delta,
                key_heads=model.delta_key_heads,
                value_heads=model.delta_value_heads,
                **sizes,
            ).way,
        )

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        return self.parallel.tensor

    @property
    def context(self) -> int:
        """Context-parallel ranks."""
        return self.parallel.context

    @property
    def tokens(self) -> int:
        """T: tokens inside layers on this rank."""
        return self.row // self.context

    @property
    def between(self) -> int:
        """Tokens between layers on this rank: a part of T under sequence parallelism."""
        return self.tokens // (self.tensor if self.parallel.sequence else 1)

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states between layers."""
        return self.between * self.model.hidden_size * self.activation

    @property
    def whole_hidden(self) -> int:
        """Bytes of the hidden states of all T tokens."""
        return self.tokens * self.model.hidden_size * self.activation

    @property
    def kv_sharing(self) -> int:
        """Tensor-parallel ranks that share a key/value head."""
        return max(1, self.tensor // self.model.kv_heads)

    @property
    def kv_heads(self) -> int:
        """Key/value heads that this rank attends with."""
        return max(1, self.model.kv_heads // self.tensor)

    @property
    def heads(self) -> int:
        """Query heads of this rank."""
        return self.model.attention_heads // self.tensor

    @property
    def qkv_width(self) -> int:
        """Features of the fused projection of full attention."""
        model = self.model
        return (2 * model.attention_heads + 2 * model.kv_heads) * model.head_dim // self.tensor

    @property
    def delta_heads(self) -> tuple[int, int]:
        """Key and value heads of the delta net."""
        return self.model.delta_key_heads // self.tensor, self.model.delta_value_heads // self.tensor

    @property
    def vocab(self) -> int:
        """Rows of the output head."""
        return ceil(self.model.vocab_size / self.tensor)

    @property
    def expert_ranks(self) -> int:
        """Expert-tensor-parallel ranks."""
        return self.parallel.expert_tensor or self.tensor

    @property
    def local_experts(self) -> int:
        """Routed experts of this rank."""
        return self.model.experts // self.parallel.expert

    @property
    def routed(self) -> int:
        """R: rows of this rank's experts, if all are used alike."""
        return self.between * self.model.experts_per_token * self.expert_ranks
