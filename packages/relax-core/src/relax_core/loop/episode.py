"""One completion while it is being sampled: turn by turn, in several parts where it was interrupted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relax_rollout import Completion, DraftCounts, Request, SamplingParams, derive_seed
from relax_rollout.pictures import PlacedPicture
from relax_rollout.requests import FinishReason
from relax_rollout.rewards import RewardInput

from relax_core.data import Prompt
from relax_core.data.examples import Message
from relax_core.loop.environments.protocol import Environment
from relax_core.loop.trajectory import NO_VERSION, Trajectory


@dataclass(frozen=True)
class EpisodeLimits:
    """Where a completion ends.

    Attributes:
        context: tokens of prompt and completion at most; None is no limit.
        turns: of the model.
        turn_tokens: of one turn; None is no limit of its own.
    """

    context: int | None = None
    turns: int = 1
    turn_tokens: int | None = None


class Episode:
    """The tokens so far, and what to ask the engine for next.

    Args:
        prompt: what it follows.
        place: numbers that name it and seed it.
        sampling: of the whole completion; its seed is not read.
        limits: where it ends.
        environment: answers the model; None ends it with the first turn.
        pictures: the prompt's, loaded.
    """

    def __init__(
        self,
        prompt: Prompt,
        place: tuple[int, ...],
        sampling: SamplingParams,
        limits: EpisodeLimits,
        environment: Environment | None,
        pictures: Sequence[PlacedPicture] = (),
    ) -> None:
        self.prompt = prompt
        self._pictures = tuple(pictures)
        self.environment = environment
        self.finish: FinishReason | None = None
        self._place = place
        self._sampling = sampling
        self._limits = limits
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._drawn: list[bool] = []
        self._turn_start = 0
        self._turns = self._parts = 0
        self._drafts: DraftCounts | None = None
        self._told: list[Message] = []
        self._metadata: dict[str, Any] = {}

    @property
    def oldest_version(self) -> int | None:
        """Of the weights that drew a token of it."""
        drawn = [v for v, own in zip(self._versions, self._drawn, strict=True) if own]
        return min(drawn, default=None)

    @property
    def turn_ids(self) -> list[int]:
        """The tokens of the present turn."""
        return self._tokens[self._turn_start :]

    def request(self, seed: int) -> Request:
        """What to ask the engine for next.

        Args:
            seed: of the run.
        """
        drawn = sum(self._drawn)
        turn_ids = len(self.turn_ids)
        room = [self._sampling.max_new_tokens - drawn]
        if self._limits.turn_tokens is not None:
            room.append(self._limits.turn_tokens - turn_ids)
        if self._limits.context is not None:
            room.append(self._limits.context - len(self.prompt.ids) - len(self._tokens))
        # A part of its own has random numbers of its own.
        place = (*self._place, self._parts) if self._parts else self._place
        return Request(
            id=".".join(map(str, place)),
            prompt_ids=(*self.prompt.prompt_ids, *self._tokens),
            sampling=replace(self._sampling, max_new_tokens=min(room), seed=derive_seed(seed, *place)),
            pictures=self._pictures,
        )

    def add(self, completion: Completion) -> None:
        """Takes what the engine drew."""
        self._append(completion.token_ids, completion.logprobs, completion.versions, drawn=True)
        self._parts += 1
        if completion.drafts is not None:
            self._drafts = (self._drafts or DraftCounts()) + completion.drafts

    def end(self, reason: FinishReason) -> None:
        """Nothing follows."""
        self._turns += 1
        self.finish = reason

    def answer(self, turn: str, replies: Sequence[Message], between: Sequence[int]) -> bool:
        """Takes what the environment said to the turn `turn`; whether there is room for another.

        Args:
            turn: text of the turn.
            replies: what the model is told.
            between: their tokens, up to where the model goes on.
        """
        room = self._sampling.max_new_tokens - sum(self._drawn)
        if self._limits.context is not None:
            used = len(self.prompt.ids) + len(self._tokens) + len(between)
            room = min(room, self._limits.context - used)
        if room < 1 or self._turns + 1 >= self._limits.turns:
            return False
        self._turns += 1
        self._told += [{"role": "assistant", "content": turn}, *replies]
        zeros = (0.0,) * len(between)
        self._append(between, zeros, (NO_VERSION,) * len(between), drawn=False)
        self._turn_start = len(self._tokens)
        return True

    def learn(self, metadata: Mapping[str, Any]) -> None:
        """What the environment has for the reward."""
        self._metadata |= metadata

    def reward_input(self, last_turn: str) -> RewardInput:
        """What the reward judges: the last turn, with all before it as the prompt."""
        prompt = self.prompt
        if self._told:
            before: Any = [*(prompt.messages or ()), *self._told]
        else:
            before = prompt.messages or prompt.prompt_text
        return RewardInput(before, last_turn, prompt.answer, {**prompt.metadata, **self._metadata})

    def trajectory(self) -> Trajectory:
        """What it came to; only once it has ended."""
        assert self.finish is not None, "the completion has not ended"
        return Trajectory(
            tuple(self._tokens),
            tuple(self._logprobs),
            tuple(self._versions),
            tuple(self._drawn),
            self.finish,
            self._turns,
            self._drafts,
        )

    def state(self) -> dict[str, Any] | None:
        """Plain values for `restore`; None where an environment holds what is no plain value."""
        if self.environment is not None:
            return None
        return {
            "place": self._place,
            "tokens": list(self._tokens),
            "logprobs": list(self._logprobs),
            "versions": list(self._versions),
            "parts": self._parts,
            "finish": self.finish,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where an episode of the same prompt stood that had no environment."""
        self._place = tuple(state["place"])
        self._append(state["tokens"], state["logprobs"], state["versions"], drawn=True)
        self._parts = state["parts"]
        if state["finish"] is not None:
            self.end(state["finish"])

    def _append(
        self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, drawn: bool
    ) -> None:
        self._tokens += ids
        self._logprobs += logprobs
        self._versions += versions
        self._drawn += [drawn] * len(ids)
