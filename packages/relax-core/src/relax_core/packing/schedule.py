"""Which samples share a micro-batch, and which rank computes it: a pure function of the samples' lengths."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

Bins = list[list[int]]


@dataclass(frozen=True)
class SampleCost:
    """Work of a sample of L tokens: `linear * L + quadratic * L^2`, in any unit.

    Feed-forwards, projections and the delta net are linear in L; causal attention is quadratic.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __call__(self, length: int) -> float:
        """The cost of a sample of `length` tokens."""
        return length * (self.linear + self.quadratic * length)


def plan_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    ranks: int = 1,
    multiple_of: int = 1,
    cost: Callable[[int], float] | None = None,
) -> list[Bins]:
    """Splits samples into micro-batches of about equal cost under a token budget, and those over ranks.

    Invariants:
        - every sample index appears exactly once in the whole plan;
        - every rank has the same number of micro-batches, a multiple of `multiple_of`, and no more than
          best-fit-decreasing needs, rounded up to that;
        - only a micro-batch of a single sample may exceed `max_tokens`;
        - a micro-batch is empty only where there are fewer samples than micro-batches (then it is padding
          alone, so that collectives find their partner);
        - ranks differ in total cost by at most as much as micro-batches of the same turn do;
        - the result depends on the arguments alone; the indices in a micro-batch ascend, and the
          micro-batches of a rank come in descending cost, so that those that meet in a collective are alike
          and the largest, which decides the peak of memory, comes first.

    Args:
        lengths: tokens of each sample.
        max_tokens: budget of one micro-batch in tokens, at least 1.
        ranks: data-parallel ranks.
        multiple_of: what the number of micro-batches of a rank must divide by, for instance the pipeline size
            of an interleaved schedule.
        cost: work of a sample by its length, positive and never falling; its length when None.

    Returns:
        For each rank its micro-batches, each a list of sample indices.

    Raises:
        ValueError: `max_tokens`, `ranks` or `multiple_of` is below 1.
    """
    for name, value in (("max_tokens", max_tokens), ("ranks", ranks), ("multiple_of", multiple_of)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    if not lengths:
        return [[] for _ in range(ranks)]
    by_length = {length: float((cost or float)(length)) for length in set(lengths)}
    costs = [by_length[length] for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packed = _best_fit(order, lengths, max_tokens)
    turns = -(-len(packed) // (ranks * multiple_of)) * multiple_of
    count = turns * ranks
    bins = _spread(order, lengths, costs, count, max_tokens) or _divide(packed, costs, count)
    return _deal(bins, costs, ranks, turns)


def _best_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Bins:
    """Best-fit-decreasing: each sample goes where it leaves the least room, or into a new bin."""
    bins: Bins = []
    shortest = lengths[order[-1]]
    rooms: list[tuple[int, int]] = []
    for i in order:
        place = bisect_left(rooms, (lengths[i], -1))
        if place < len(rooms):
            room, b = rooms.pop(place)
            bins[b].append(i)
        else:
            room, b = max_tokens, len(bins)
            bins.append([i])
        if room - lengths[i] >= shortest:
            insort(rooms, (room - lengths[i], b))
    return bins


def _spread(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], count: int, max_tokens: int
) -> Bins | None:
    """Costliest first onto the cheapest bin with room; None where that leaves a sample without room.

    Bins that are passed over for want of room are tried again; where that happens so often that it would
    cost more than it gains, None as well.
    """
    bins: Bins = [[] for _ in range(count)]
    heap = [(0.0, 0, b) for b in range(count)]
    shortest = lengths[order[-1]]
    patience = len(order)
    for i in order:
        passed = []
        while heap and heap[0][1] and heap[0][1] + lengths[i] > max_tokens:
            passed.append(heappop(heap))
        patience -= len(passed)
        if not heap or patience < 0:
            return None
        total, tokens, b = heappop(heap)
        bins[b].append(i)
        for entry in (*passed, (total + costs[i], tokens + lengths[i], b)):
            if entry[1] + shortest <= max_tokens:
                heappush(heap, entry)
    return bins


def _divide(bins: Bins, costs: Sequence[float], count: int) -> Bins:
    """Halves the costliest bins of several samples until there are `count` bins, empty ones if need be."""
    heap = [(-sum(costs[i] for i in members), members) for members in bins]
    heapify(heap)
    done: Bins = []
    while heap and len(done) + len(heap) < count:
        _, members = heappop(heap)
        if len(members) == 1:
            done.append(members)
            continue
        halves: list[tuple[float, list[int]]] = [(0.0, []), (0.0, [])]
        for i in sorted(members, key=lambda i: (-costs[i], i)):
            total, half = halves[0]
            halves = sorted([(total + costs[i], [*half, i]), halves[1]])
        for total, half in halves:
            heappush(heap, (-total, half))
    done += [members for _, members in heap]
    return done + [[] for _ in range(count - len(done))]


def _deal(bins: Bins, costs: Sequence[float], ranks: int, turns: int) -> list[Bins]:
    """Turn by turn: the costliest bins left go to the ranks, the costliest to the rank with the least."""
    priced = sorted((-sum(costs[i] for i in members), sorted(members)) for members in bins)
    plan: list[Bins] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for turn in range(turns):
        poorest = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, (price, members) in zip(poorest, priced[turn * ranks : (turn + 1) * ranks], strict=True):
            plan[rank].append(members)
            totals[rank] -= price
    return plan
