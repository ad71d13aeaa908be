"""What an engine refuses before anything is drawn."""

from collections.abc import Collection, Sequence

from relax_rollout.requests import InvalidRequestError, Request


def check_requests(
    requests: Sequence[Request],
    in_flight: Collection[str],
    *,
    vocabulary: int,
    context: int,
    patch: tuple[int, int] | None = None,
) -> None:
    """Check the requests of one call.

    Args:
        requests: of the call.
        in_flight: ids of the requests that the engine has already.
        vocabulary: number of tokens that the model knows.
        context: the most tokens of prompt and completion together.
        patch: numbers of a picture's patch, and patches along one side of a token, as the vision tower takes
            them; None if the engine has no tower.

    Raises:
        InvalidRequestError: an id in flight, a token id outside the vocabulary, a request too long, or
            pictures that the engine cannot see.
    """
    seen: set[str] = set()
    for request in requests:
        if request.id in seen or request.id in in_flight:
            raise InvalidRequestError(f"request id {request.id!r} is in flight already; ids must be unique")
        seen.add(request.id)
        _check_pictures(request, patch)
        length, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if length + new > context:
            raise InvalidRequestError(
                f"request {request.id!r} has {length} prompt tokens and max_new_tokens {new}, together "
                f"{length + new}; the model's context is {context} tokens"
            )
        for token in (max(request.prompt_ids), *request.sampling.stop_token_ids, *request.logprob_ids):
            if token >= vocabulary:
                raise InvalidRequestError(
                    f"request {request.id!r} has token id {token}; the model's vocabulary has "
                    f"{vocabulary} (ids 0 to {vocabulary - 1})"
                )
        if request.top_logprobs > vocabulary:
            raise InvalidRequestError(
                f"request {request.id!r} asks for {request.top_logprobs} top_logprobs; the model's "
                f"vocabulary has {vocabulary} tokens"
            )


def _check_pictures(request: Request, patch: tuple[int, int] | None) -> None:
    if not request.pictures:
        return
    if patch is None:
        raise InvalidRequestError(
            f"request {request.id!r} has pictures, and the engine has no vision tower: create it with "
            "pictures=True from a checkpoint that has one"
        )
    for number, one in enumerate(request.pictures):
        given = (one.picture.features, one.picture.merge)
        if given != patch:
            raise InvalidRequestError(
                f"picture {number} of request {request.id!r} has patches of {given[0]} numbers, {given[1]} x "
                f"{given[1]} of them a token; the model's have {patch[0]}, {patch[1]} x {patch[1]}: use its "
                "own image processor"
            )
