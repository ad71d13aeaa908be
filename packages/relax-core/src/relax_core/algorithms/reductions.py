"""From per-token values to one loss: weights w and a global denominator Z with loss = sum(w * value) / Z.

Axes: T packed positions, N sequences. A token counts if its mask is set; a sequence or group counts if it
has a token that counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from relax_core.algorithms.kinds import Reduction


@dataclass(frozen=True)
class SequenceWeights:
    """The weight of every counted token of each sequence, and this part's share of Z.

    Attributes:
        weights: N numbers; 0 for a sequence without a counted token.
        denominator: summed over all parts of the batch it is Z.
    """

    weights: tuple[float, ...]
    denominator: float


@dataclass(frozen=True)
class TokenWeights:
    """The weight of every position, and this part's share of Z.

    Attributes:
        weight_T: [T] float; 0 where the mask is not set.
        denominator: summed over all parts of the batch it is Z.
    """

    weight_T: Tensor
    denominator: float


def sequence_weights(
    kind: Reduction,
    token_counts: Sequence[int],
    group_ids: Sequence[int] | None = None,
    *,
    group_tokens: Mapping[int, int] | None = None,
    fixed_length: int | None = None,
) -> SequenceWeights:
    """Weights on the host, from the number of counted tokens of each sequence.

        token_mean     w = 1                      Z = tokens       DAPO, arXiv 2503.14476, section 3.3
        sequence_mean  w = 1 / its tokens         Z = sequences    GRPO, arXiv 2402.03300, equation 3
        group_mean     w = 1 / its group's tokens Z = groups       token mean per prompt, mean over prompts
        fixed_length   w = 1 / fixed_length       Z = sequences    Dr. GRPO, arXiv 2503.20783, section 3.2
        sequence_sum   w = 1                      Z = sequences    log-prob of a whole completion, as in RLOO

    Invariants: the weights of a sequence depend on the whole batch only through `group_tokens`; Z summed over
    the parts of any split of a batch is that of the batch.

    Args:
        kind: the reduction.
        token_counts: counted tokens of each of the N sequences of this part.
        group_ids: group of each sequence; needed by group_mean.
        group_tokens: counted tokens of each group over the *whole* batch; needed when a group is split over
            parts. None: every group is complete here.
        fixed_length: divisor of fixed_length, in tokens.

    Raises:
        ValueError: an argument the reduction needs is missing or does not fit.
    """
    counted = [count > 0 for count in token_counts]
    if kind == "token_mean":
        return SequenceWeights(tuple(float(c) for c in counted), float(sum(token_counts)))
    if kind == "sequence_mean":
        return SequenceWeights(tuple(1 / n if n else 0.0 for n in token_counts), float(sum(counted)))
    if kind == "fixed_length":
        if fixed_length is None or fixed_length < 1:
            raise ValueError(
                f"reduction 'fixed_length' needs a fixed_length of at least 1 token, not {fixed_length}"
            )
        return SequenceWeights(tuple(c / fixed_length for c in counted), float(sum(counted)))
    if kind == "sequence_sum":
        return SequenceWeights(tuple(float(c) for c in counted), float(sum(counted)))
    if kind == "group_mean":
        return _group_mean(token_counts, group_ids, group_tokens)
    assert_never(kind)


def token_weights(
    kind: Reduction,
    mask_T: Tensor,
    lengths: Sequence[int],
    group_ids: Sequence[int] | None = None,
    *,
    group_tokens: Mapping[int, int] | None = None,
    fixed_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> TokenWeights:
    """`sequence_weights` spread over packed positions.

    Args:
        kind: the reduction.
        mask_T: [T] bool or 0/1, the tokens that count. Read on the host: keep it on the CPU.
        lengths: positions of each of the N sequences; their sum is T.
        group_ids: see `sequence_weights`.
        group_tokens: see `sequence_weights`.
        fixed_length: see `sequence_weights`.
        dtype: of the weights.

    Raises:
        ValueError: as `sequence_weights`, or the lengths do not add up to T.
    """
    if sum(lengths) != mask_T.numel():
        raise ValueError(f"lengths add up to {sum(lengths)} positions, the mask has {mask_T.numel()}")
    mask_T = mask_T.bool()
    counts = [int(part.sum()) for part in torch.split(mask_T, list(lengths))]
    weights = sequence_weights(kind, counts, group_ids, group_tokens=group_tokens, fixed_length=fixed_length)
    weight_N = torch.tensor(weights.weights, dtype=dtype, device=mask_T.device)
    spread_T = weight_N.repeat_interleave(torch.tensor(list(lengths), device=mask_T.device))
    return TokenWeights(spread_T * mask_T, weights.denominator)


def _group_mean(
    token_counts: Sequence[int], group_ids: Sequence[int] | None, group_tokens: Mapping[int, int] | None
) -> SequenceWeights:
    if group_ids is None or len(group_ids) != len(token_counts):
        given = "none" if group_ids is None else str(len(group_ids))
        raise ValueError(
            f"reduction 'group_mean' needs a group id for each of the {len(token_counts)} sequences; "
            f"given: {given}"
        )
    here: dict[int, int] = {}
    for group, count in zip(group_ids, token_counts, strict=True):
        here[group] = here.get(group, 0) + count
    total = here if group_tokens is None else group_tokens
    for group, count in here.items():
        if total.get(group, 0) < count:
            raise ValueError(
                f"group {group} has {count} tokens here but {total.get(group, 0)} in the whole batch"
            )
    weights = tuple(1 / total[g] if n else 0.0 for g, n in zip(group_ids, token_counts, strict=True))
    share = sum(count / total[group] for group, count in here.items() if count)
    return SequenceWeights(weights, float(share))
