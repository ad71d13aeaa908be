"""One completion while it is being drawn."""

import secrets
from collections.abc import Callable
from typing import Any

from relax_rollout.requests import SEED_LIMIT, Completion, FinishReason, Request


class Row:
    """A request with the tokens drawn so far.

    Args:
        request: what was asked.
        on_finish: called once with the row when it has ended.
    """

    __slots__ = (
        "_on_finish", "error", "finish", "id_logprobs", "logprobs", "request", "seed", "stop", "tokens",
        "top_logprobs", "versions",
    )  # fmt: skip

    def __init__(self, request: Request, on_finish: "Callable[[Row], None]") -> None:
        self.request = request
        self.seed = secrets.randbelow(SEED_LIMIT) if request.sampling.seed is None else request.sampling.seed
        self.stop = frozenset(request.sampling.stop_token_ids)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.id_logprobs: list[tuple[float, ...]] = []
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self._on_finish = on_finish

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and tokens drawn so far."""
        return (*self.request.prompt_ids, *self.tokens) if self.tokens else self.request.prompt_ids

    @property
    def prefill_key(self) -> tuple[Any, ...]:
        """Rows with equal keys have one context, pictures included."""
        return (self.context, *((id(one.picture), one.start) for one in self.request.pictures))

    @property
    def remaining(self) -> int:
        """The most tokens still to draw."""
        return self.request.sampling.max_new_tokens - len(self.tokens)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Add a drawn token; ends the row if it is a stop token or the last one allowed."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stop:
            self.end("stop")
        elif self.remaining == 0:
            self.end("length")

    def end(self, reason: FinishReason) -> None:
        """End the row, once."""
        if self.finish is None:
            self.finish = reason
            self._on_finish(self)

    def fail(self, error: Exception) -> None:
        """End the row with an error instead of a completion."""
        if self.finish is None:
            self.error = error
            self.end("abort")

    def completion(self) -> Completion:
        """What was drawn; only of a row that has ended."""
        assert self.finish is not None, "the row has not ended"
        return Completion(
            request_id=self.request.id,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=self.finish,
            top_logprobs=tuple(self.top_logprobs),
            id_logprobs=tuple(self.id_logprobs),
        )
