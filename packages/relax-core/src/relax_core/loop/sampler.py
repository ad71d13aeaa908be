"""`Sampler`: prompts in, scored groups out."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from relax_rollout import Completion, Request, RolloutEngine, SamplingParams

from relax_core.data import Prompt
from relax_core.loop.environments.protocol import EnvironmentFactory, Reply
from relax_core.loop.environments.turns import Turns
from relax_core.loop.episode import Episode, EpisodeLimits
from relax_core.loop.groups import Group, Scored
from relax_core.loop.judging import judging
from relax_core.loop.rollout import Scorer
from relax_core.run.trace import draw_others, span

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """The groups of one step.

    Attributes:
        groups: those to train on.
        dropped: groups that dynamic sampling threw away.
        tokens: tokens sampled, those of dropped groups included.
    """

    groups: tuple[Group, ...]
    dropped: int
    tokens: int


class Phases(Protocol):
    """What is told how long sampling and scoring take."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Entered for the time of a phase."""
        ...


@dataclass(frozen=True)
class Dialogue:
    """Completions of several turns.

    Attributes:
        start: makes the environment of a completion.
        turns: makes tokens of its replies.
        reply_s: after which a reply counts as failed, in seconds; None waits for it.
    """

    start: EnvironmentFactory
    turns: Turns
    reply_s: float | None


@dataclass(frozen=True)
class TimeLimits:
    """After so many seconds completions are ended with what they have; None never ends them.

    Attributes:
        request_s: for one turn of one completion.
        group_s: for the completions of one prompt.
    """

    request_s: float | None = None
    group_s: float | None = None


class Sampler:
    """Samples and scores completions.

    A completion depends on the weights, its prompt, `seed` and its place (step, round, prompt, member), never
    on what was sampled before: that is what makes a resumed run equal to an uninterrupted one.

    Args:
        engine, scorer, tokenizer: of the run.
        recorder: is told of the phases.
        stop_token_ids: that end a turn.
        seed: of the run.
        limits: where completions end.
        times: limits of time.
        dialogue: what answers the model, if anything.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        scorer: Scorer,
        tokenizer: Any,
        recorder: Phases,
        *,
        stop_token_ids: Sequence[int],
        seed: int,
        limits: EpisodeLimits | None = None,
        times: TimeLimits | None = None,
        dialogue: Dialogue | None = None,
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._recorder = recorder
        self.stop_token_ids = tuple(stop_token_ids)
        self._seed = seed
        self._limits = limits or EpisodeLimits()
        self._times = times or TimeLimits()
        self._dialogue = dialogue
        self._in_flight: set[str] = set()

    def episodes(
        self, prompt: Prompt, sampling: SamplingParams, *, samples_per_prompt: int, place: tuple[int, ...]
    ) -> list[Episode]:
        """The completions of a prompt before their first token; their own numbers end their places."""
        pictures = [one.load() for one in prompt.pictures]
        return [
            Episode(
                prompt,
                (*place, member),
                sampling,
                self._limits,
                self._dialogue.start(prompt) if self._dialogue is not None else None,
                pictures,
            )
            for member in range(samples_per_prompt)
        ]

    async def groups(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        samples_per_prompt: int,
        place: tuple[int, ...],
    ) -> list[Group]:
        """Samples `samples_per_prompt` completions of each prompt and scores them."""
        episodes = [
            episode
            for index, prompt in enumerate(prompts)
            for episode in self.episodes(
                prompt, sampling, samples_per_prompt=samples_per_prompt, place=(*place, index)
            )
        ]
        await self.sample(episodes)
        return await self.score(episodes)

    async def sample(self, episodes: Sequence[Episode], halted: Callable[[], bool] = lambda: False) -> None:
        """Samples until all have ended.

        Args:
            episodes: of any prompts; turn by turn they are asked for together.
            halted: asked after every turn; once it says so those that have not ended stay as they are, and
                those that the engine was told to abort with what they have.
        """
        started = time.monotonic()
        with self._recorder.phase("rollout"):
            while not halted():
                open_ = [episode for episode in episodes if episode.finish is None]
                if not open_:
                    return
                left = self._seconds_left(started)
                if left is not None and left <= 0:
                    for episode in open_:
                        episode.end("abort")
                    return
                completions = await self._generate([e.request(self._seed) for e in open_], left)
                await asyncio.gather(
                    *(self._turn(e, c, halted) for e, c in zip(open_, completions, strict=True))
                )

    async def abort(self) -> None:
        """Makes the engine end what it samples for this sampler, with what there is."""
        await self._engine.abort(sorted(self._in_flight))

    async def score(self, episodes: Sequence[Episode]) -> list[Group]:
        """Scores completions that have ended; consecutive ones of one prompt are a group."""
        with self._recorder.phase("rollout"):
            trajectories = [episode.trajectory() for episode in episodes]
            texts = self._texts([trajectory.token_ids for trajectory in trajectories])
            last = texts if self._dialogue is None else self._texts([e.turn_ids for e in episodes])
        with self._recorder.phase("reward"), span("score", "reward", completions=len(episodes)) as shown:
            asked = time.perf_counter()
            results = await self._scorer.score(
                [episode.reward_input(turn) for episode, turn in zip(episodes, last, strict=True)]
            )
            elapsed = [result.elapsed_s for result in results]
            shown |= {"worker_seconds": sum(elapsed), "longest_s": max(elapsed, default=0.0)}
            draw_others(judging(results), asked, time.perf_counter())
        groups: list[Group] = []
        for episode, trajectory, text, result in zip(episodes, trajectories, texts, results, strict=True):
            scored = Scored(trajectory, text, result)
            if groups and groups[-1].prompt is episode.prompt:
                groups[-1] = Group(episode.prompt, (*groups[-1].members, scored))
            else:
                groups.append(Group(episode.prompt, (scored,)))
        return groups

    def _seconds_left(self, started: float) -> float | None:
        """For the next turn: until the request's or the group's limit."""
        limits = []
        if self._times.request_s is not None:
            limits.append(self._times.request_s)
        if self._times.group_s is not None:
            limits.append(started + self._times.group_s - time.monotonic())
        return min(limits, default=None)

    async def _generate(self, requests: Sequence[Request], limit_s: float | None) -> list[Completion]:
        ids = {request.id for request in requests}
        self._in_flight |= ids
        watch = None if limit_s is None else asyncio.create_task(self._abort_after(limit_s, sorted(ids)))
        try:
            return await self._engine.generate(requests)
        finally:
            self._in_flight -= ids
            if watch is not None:
                watch.cancel()

    async def _abort_after(self, limit_s: float, ids: Sequence[str]) -> None:
        await asyncio.sleep(limit_s)
        await self._engine.abort(ids)

    async def _turn(self, episode: Episode, completion: Completion, halted: Callable[[], bool]) -> None:
        """Takes one turn, or a part of it, and lets the environment answer."""
        episode.add(completion)
        reason = completion.finish_reason
        if reason == "abort":
            if not halted():
                episode.end("abort")
            return
        if self._dialogue is None:
            episode.end(reason)
            return
        (turn,) = self._texts([episode.turn_ids])
        reply = await self._reply(episode, turn)
        messages = tuple(self._dialogue.turns.clean(message) for message in reply.messages)
        episode.learn(reply.metadata)
        last = episode.turn_ids[-1] if reason == "stop" else None
        between = self._dialogue.turns.between(messages, last=last) if messages else ()
        if not messages:
            episode.end(reason)
        elif not episode.answer(turn, messages, between):
            episode.end("length")

    async def _reply(self, episode: Episode, turn: str) -> Reply:
        """An environment that fails ends the completion; the reward is told why."""
        assert self._dialogue is not None
        assert episode.environment is not None
        try:
            async with asyncio.timeout(self._dialogue.reply_s):
                return await episode.environment.reply(turn)
        except Exception as error:  # the user's code may raise anything
            problem = f"{type(error).__name__}: {error}"
            _log.warning("an environment failed, and its completion ends: %s", problem)
            return Reply(metadata={"environment_error": problem})

    def _texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(list(rows), skip_special_tokens=True)
        return texts
