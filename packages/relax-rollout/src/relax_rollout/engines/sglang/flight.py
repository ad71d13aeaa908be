"""A request on its way: as SGLang wants it, and as it came back."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_rollout.engine import EngineError
from relax_rollout.engines.sglang.pictures import to_item
from relax_rollout.requests import SEED_LIMIT, Completion, DraftCounts, Request


@dataclass(slots=True)
class Flight:
    """One request of a generate call.

    Args:
        request: as it was asked.
        rid: its id at the servers; ends with a dot, as SGLang aborts by prefix.
        server: where it is being drawn, or None while it waits here.
        aborted: that it was asked to end.
        completion: its answer, once there is one.
    """

    request: Request
    rid: str
    server: Any = None
    aborted: bool = False
    completion: Completion | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        given = self.request.sampling.seed
        self.seed = secrets.randbelow(SEED_LIMIT) if given is None else given

    def done(self) -> Completion:
        """The completion; only once there is one."""
        assert self.completion is not None, "the request has not ended"
        return self.completion


def to_body(flights: Sequence[Flight]) -> dict[str, Any]:
    """The body of one ``/generate`` call for several requests."""
    body: dict[str, Any] = {
        "rid": [f.rid for f in flights],
        "input_ids": [list(f.request.prompt_ids) for f in flights],
        "sampling_params": [_sampling(f) for f in flights],
        "return_logprob": [True] * len(flights),
        "logprob_start_len": [-1] * len(flights),
        "top_logprobs_num": [f.request.top_logprobs for f in flights],
    }
    if any(f.request.pictures for f in flights):
        body["image_data"] = [[to_item(f.request.pictures)] for f in flights]
    if any(f.request.logprob_ids for f in flights):
        # SGLang takes a list for every request or for none.
        body["token_ids_logprob"] = [list(f.request.logprob_ids) or [0] for f in flights]
    return body


def to_single_body(flight: Flight) -> dict[str, Any]:
    """The body of one ``/generate`` call for one request, the only kind that sglang-router passes on."""
    return {name: values[0] for name, values in to_body([flight]).items()}


def _sampling(flight: Flight) -> dict[str, Any]:
    asked = flight.request.sampling
    return {
        "max_new_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k or -1,
        "stop_token_ids": list(asked.stop_token_ids),
        "sampling_seed": flight.seed,
        "skip_special_tokens": False,
    }


def to_completion(flight: Flight, answer: Mapping[str, Any]) -> Completion:
    """A completion of SGLang's answer.

    Args:
        flight: the request.
        answer: SGLang's, of this request.

    Raises:
        EngineError: log-probs that are not finite, or SGLang ended the request of its own accord.
    """
    meta, request = answer["meta_info"], flight.request
    tokens = tuple(answer.get("output_ids") or ())
    reason = meta["finish_reason"]
    if reason["type"] == "abort" and not flight.aborted:
        raise EngineError(f"SGLang ended request {request.id!r}: {reason.get('message')}")
    versions = tuple(meta.get("relax_versions") or ())[: len(tokens)]
    logprobs = tuple(entry[0] for entry in meta.get("output_token_logprobs") or ())[: len(tokens)]
    for place, value in enumerate(logprobs):
        if value is None or not math.isfinite(value) or value < -1e30:
            raise EngineError(
                f"the logits of request {request.id!r} after {place} tokens are not finite under weights "
                f"version {versions[place]}: the weights have overflowed or an update broke them"
            )
    finish = {"stop": "stop", "length": "length", "abort": "abort"}[reason["type"]]
    if finish == "length" and tokens and tokens[-1] in request.sampling.stop_token_ids:
        # SGLang asks for the length first: a completion that ends with the last token it may have is whole.
        finish = "stop"
    return Completion(
        request_id=request.id,
        token_ids=tokens,
        logprobs=logprobs,
        versions=versions,
        finish_reason=finish,  # type: ignore[arg-type]
        top_logprobs=_top(meta, len(tokens)) if request.top_logprobs else (),
        id_logprobs=_ids(meta, request.logprob_ids, len(tokens)) if request.logprob_ids else (),
        drafts=_drafts(meta),
    )


def _top(meta: Mapping[str, Any], count: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    return tuple(
        tuple((entry[1], entry[0]) for entry in place) for place in meta["output_top_logprobs"][:count]
    )


def _ids(meta: Mapping[str, Any], ids: Sequence[int], count: int) -> tuple[tuple[float, ...], ...]:
    rows = []
    for place in meta["output_token_ids_logprobs"][:count]:
        known = {entry[1]: entry[0] for entry in place}
        rows.append(tuple(known[token] for token in ids))
    return tuple(rows)


def _drafts(meta: Mapping[str, Any]) -> DraftCounts | None:
    if "spec_verify_ct" not in meta:
        return None
    return DraftCounts(
        meta["spec_verify_ct"], meta["spec_num_proposed_drafts"], meta["spec_num_correct_drafts"]
    )
