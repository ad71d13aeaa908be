"""Aborting a request that has tokens and waits (it was retracted): it keeps what it has."""

from typing import Any


def around_abort_request(original: Any, scheduler: Any, wanted: Any) -> None:
    """SGLang drops such a request's tokens; here it ends as one that was running does."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    kept = []
    for request in scheduler.waiting_queue:
        asked = wanted.abort_all or request.rid.startswith(wanted.rid)
        if not asked or not request.output_ids:
            kept.append(request)
            continue
        request.finished_reason = FINISH_ABORT("aborted while it waited to be recomputed")
        scheduler.output_streamer.stream_output([request], request.return_logprob)
    if len(kept) < len(scheduler.waiting_queue):
        scheduler.waiting_queue[:] = kept
    original(scheduler, wanted)
