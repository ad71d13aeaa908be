"""Which samples share a micro-batch: a pure function of their lengths."""

from collections.abc import Sequence
from heapq import heappop, heappush


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Splits samples into micro-batches of about equal size under a token budget.

    Invariants:
        - every sample index appears exactly once;
        - only a micro-batch of a single sample may exceed `max_tokens`;
        - the result depends on the arguments alone, and indices inside a micro-batch ascend.

    The number of micro-batches is the fewest that first-fit-decreasing needs; samples are then spread,
    longest first, onto the micro-batch with the fewest tokens, and the first-fit packing stays where that
    spreading would exceed the budget.

    Args:
        lengths: tokens of each sample.
        max_tokens: budget of one micro-batch in tokens, at least 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: it must be at least 1")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packed = _first_fit(order, lengths, max_tokens)
    spread = _spread(order, lengths, len(packed))
    if all(len(members) == 1 or sum(lengths[i] for i in members) <= max_tokens for members in spread):
        packed = spread
    return sorted(sorted(members) for members in packed)


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    first_open = 0
    for i in order:
        # Bins too full for even the shortest sample are skipped for good, which keeps this near linear.
        while first_open < len(bins) and room[first_open] < lengths[order[-1]]:
            first_open += 1
        for b in range(first_open, len(bins)):
            if lengths[i] <= room[b]:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(max_tokens - lengths[i])
    return bins


def _spread(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in order:
        tokens, b = heappop(heap)
        bins[b].append(i)
        heappush(heap, (tokens + lengths[i], b))
    return bins
