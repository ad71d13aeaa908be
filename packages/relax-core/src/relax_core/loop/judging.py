"""What the workers of a reward did, for the timeline."""

import time
from collections.abc import Sequence

from relax_rollout.rewards import RewardResult

from relax_core.run.trace import ProcessSpans, Span, in_lanes


def judging(results: Sequence[RewardResult]) -> list[ProcessSpans]:
    """The spans of each worker process, by this process's clock as far as their wall clocks agree."""
    ahead = time.time() - time.perf_counter()
    by_worker: dict[str, list[Span]] = {}
    for result in results:
        if result.worker is None or result.ended_at is None:
            continue
        end = result.ended_at - ahead
        shown = {"score": result.score, **({} if result.error is None else {"error": result.error})}
        by_worker.setdefault(result.worker, []).append(
            ("judge", "reward", end - result.elapsed_s, end, shown)
        )
    return [
        ProcessSpans(f"reward worker {worker}", max(span[3] for span in spans), in_lanes(spans))
        for worker, spans in by_worker.items()
    ]
