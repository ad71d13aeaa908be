"""What an engine is asked for and what it answers: token ids in, token ids out."""

import math
from dataclasses import dataclass
from typing import Literal

from relax_rollout.pictures import PlacedPicture

FinishReason = Literal["stop", "length", "abort"]

PauseMode = Literal["keep", "recompute", "abort"]
"""What becomes of requests in flight: their caches stay, or are dropped and computed anew, or they end."""

SEED_LIMIT = 2**63
"""Seeds are whole numbers in [0, SEED_LIMIT)."""


class InvalidRequestError(ValueError):
    """A request that no engine can serve: says what was given, what is allowed and what to do."""


def _require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    upper = "" if high is None else f" and below {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} is {value!r}; it must be a whole number of at least {low}{upper}")
    if value < low or (high is not None and value >= high):
        raise InvalidRequestError(f"{name} is {value}; it must be at least {low}{upper}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one completion are drawn.

    The logits are divided by ``temperature``; of the result the ``top_k`` most probable tokens are kept, and
    of those, renormalised, the smallest set of most probable tokens whose probability reaches ``top_p``.
    Tokens that tie with the last one kept are kept too.

    Args:
        max_new_tokens: the most tokens drawn, at least 1.
        temperature: 0 takes the most probable token (greedy; the lowest id among ties), else above 0.
        top_p: probability mass kept, in (0, 1]; 1 keeps all.
        top_k: number of tokens kept; 0 keeps all.
        stop_token_ids: drawing one of these ends the completion; it is the completion's last token. No engine
            adds a stop token of its own accord (the tokenizer's end-of-text token included).
        seed: in [0, 2**63). None draws one from the operating system. Two requests of the same prompt and
            seed get the same tokens, so give the members of a group different seeds (see
            :func:`relax_rollout.derive_seed`).

    Raises:
        InvalidRequestError: a value outside those ranges.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_int("max_new_tokens", self.max_new_tokens, 1)
        _require_int("top_k", self.top_k, 0)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, SEED_LIMIT)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequestError(
                f"temperature is {self.temperature}; it must be finite and at least 0 (0 means greedy)"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(
                f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 keeps all)"
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _require_int("a stop token id", token, 0)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to draw.

    Args:
        id: names the request in completions, errors and :meth:`RolloutEngine.abort`; unique among those in
            flight.
        prompt_ids: token ids of the prompt, at least one. Requests of one call that share a prompt share its
            prefill.
        sampling: how tokens are drawn.
        top_logprobs: how many of the most probable tokens to give with each token drawn.
        logprob_ids: token ids whose log-probs to give with each token drawn.
        pictures: of the prompt, in the order of their tokens, which the prompt holds already: as many as
            stand for each.

    Raises:
        InvalidRequestError: an empty id or prompt, a number that is not a whole one of at least 0, or a
            picture whose tokens do not lie in the prompt.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    top_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()
    pictures: tuple[PlacedPicture, ...] = ()

    def __post_init__(self) -> None:
        if not self.id:
            raise InvalidRequestError(
                "a request has an empty id; give it a name that is unique among those in flight"
            )
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))
        if not self.prompt_ids:
            raise InvalidRequestError(
                f"request {self.id!r} has an empty prompt; it needs at least one token id"
            )
        for token in self.prompt_ids:
            if type(token) is not int or token < 0:
                _require_int(f"a prompt token id of request {self.id!r}", token, 0)
        _require_int(f"top_logprobs of request {self.id!r}", self.top_logprobs, 0)
        object.__setattr__(self, "logprob_ids", tuple(self.logprob_ids))
        for token in self.logprob_ids:
            _require_int(f"a token id of logprob_ids of request {self.id!r}", token, 0)
        self._check_pictures()

    def _check_pictures(self) -> None:
        object.__setattr__(self, "pictures", tuple(self.pictures))
        end = 0
        for number, one in enumerate(self.pictures):
            if not end <= one.start <= len(self.prompt_ids) - one.picture.tokens:
                raise InvalidRequestError(
                    f"picture {number} of request {self.id!r} has {one.picture.tokens} tokens from place "
                    f"{one.start}: they must lie between place {end} and the prompt's end "
                    f"{len(self.prompt_ids)}, in the order of the pictures"
                )
            end = one.end


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What speculative decoding did for a completion, or for several.

    Args:
        steps: verifications by the model.
        drafted: tokens proposed to it.
        accepted: of these, the ones that stood.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            self.steps + other.steps, self.drafted + other.drafted, self.accepted + other.accepted
        )

    @property
    def rate(self) -> float:
        """Share of the drafted tokens that stood; 0 if none was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def length(self) -> float:
        """Tokens per verification: the accepted ones and the one the model drew itself."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens drawn for one request.

    Args:
        request_id: the request's id.
        token_ids: tokens drawn, the stop token included; empty only if aborted before the first.
        logprobs: for each token its log-probability (natural, float32) under the model at the sampling
            temperature, over the whole vocabulary, that is before top-k and top-p; at temperature 0, at
            temperature 1.
        versions: for each token the version of the weights that produced it.
        finish_reason: "stop" (a stop token), "length" (max_new_tokens) or "abort".
        top_logprobs: for each token the (token id, log-prob) pairs of the request's ``top_logprobs`` most
            probable ones, most probable first; empty if none were asked for.
        id_logprobs: for each token the log-probs of the request's ``logprob_ids``, in their order; empty if
            none were asked for.
        drafts: what speculative decoding did; None without it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    id_logprobs: tuple[tuple[float, ...], ...] = ()
    drafts: DraftCounts | None = None
