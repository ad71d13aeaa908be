"""Sampling the groups of a step when the step asks for them."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relax_rollout import SamplingParams
from relax_rollout.filters import nonzero_spread

from relax_core.data import ExampleStream, Prompt
from relax_core.loop.config import RolloutConfig
from relax_core.loop.episode import Episode
from relax_core.loop.groups import Group
from relax_core.loop.sampler import Batch, Sampler
from relax_core.run import Recorder

_log = logging.getLogger(__name__)


def sampling_params(config: RolloutConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How the completions of a run are drawn; each has a seed of its own."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=stop_token_ids,
    )


class Stepwise:
    """The groups of a step: one for each wanted prompt, or, with dynamic sampling, those with spread.

    Dynamic sampling draws new prompts for the groups it drops, at most `config.max_refills` times, and keeps
    groups in the order they were drawn (DAPO, arXiv 2503.14476, section 3.2).

    Args:
        sampler: samples and scores.
        stream: gives prompts.
        config: of sampling.
    """

    def __init__(self, sampler: Sampler, stream: ExampleStream[Prompt], config: RolloutConfig) -> None:
        self._sampler = sampler
        self._stream = stream
        self._config = config

    async def take(self, step: int) -> Batch:
        """The groups of step `step`."""
        config = self._config
        wanted = config.prompts_per_step
        kept: list[Group] = []
        dropped = tokens = 0
        for attempt in range(config.max_refills + 1 if config.dynamic_sampling else 1):
            count = math.ceil((wanted - len(kept)) * config.over_sampling)
            groups = await self._sampler.groups(
                self._stream.take(count),
                sampling_params(config, self._sampler.stop_token_ids),
                samples_per_prompt=config.samples_per_prompt,
                place=(step, attempt),
            )
            tokens += sum(group.drawn_count for group in groups)
            if not config.dynamic_sampling:
                return Batch(tuple(groups), 0, tokens)
            useful = [group for group in groups if has_spread(group)]
            dropped += len(groups) - len(useful)
            kept += useful
            if len(kept) >= wanted:
                break
        if not kept:
            _log.warning("step %d: no group has any spread in its rewards; this step teaches nothing", step)
            kept = groups
        return Batch(tuple(kept[:wanted]), dropped, tokens)

    async def advance(self, version: int) -> None:
        """Nothing is sampled ahead."""

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {"prompts": self._stream.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved stream stood."""
        self._stream.load_state_dict(state["prompts"])


@dataclass
class _Begun:
    """A prompt that was drawn: its number, the stream before it was, and its completions."""

    number: int
    cursor: dict[str, Any]
    prompt: Prompt
    episodes: list[Episode]


class Racing:
    """More prompts are begun than a step wants; once enough groups are whole, the others are stopped.

    What was stopped comes first in the next step, so that every prompt is trained once: with
    `early_abort: continue` with the tokens it has, which the new weights go on from (partial rollouts), with
    `restart` from its first token. A group whose oldest token would be more than `partial_versions` versions
    old is begun anew in either case.

    Which groups are first depends on how long sampling takes, and so do the bits of such a run.

    Args:
        sampler: samples and scores; measures no phases.
        stream: gives prompts.
        recorder: is told of the wait.
        config: of sampling.
    """

    def __init__(
        self, sampler: Sampler, stream: ExampleStream[Prompt], recorder: Recorder, config: RolloutConfig
    ) -> None:
        self._sampler = sampler
        self._stream = stream
        self._recorder = recorder
        self._config = config
        self._left: deque[_Begun] = deque()
        self._drawn = self._version = 0

    async def take(self, step: int) -> Batch:
        """The first groups that are whole, in the order of their prompts."""
        config = self._config
        wanted = config.prompts_per_step
        kept: dict[int, Group] = {}
        useless: dict[int, Group] = {}
        with self._recorder.phase("rollout"):
            for _ in range(config.max_refills + 1 if config.dynamic_sampling else 1):
                count = math.ceil((wanted - len(kept)) * config.over_sampling)
                await self._race([self._next() for _ in range(count)], kept, useless)
                if len(kept) >= wanted:
                    break
        tokens = sum(group.drawn_count for group in (*kept.values(), *useless.values()))
        if not kept:
            _log.warning("step %d: no group has any spread in its rewards; this step teaches nothing", step)
            kept, useless = dict(list(useless.items())[:wanted]), {}
        return Batch(tuple(kept[number] for number in sorted(kept)), len(useless), tokens)

    async def advance(self, version: int) -> None:
        """The engine serves `version` from here on: what is too old for it is begun anew."""
        self._version = version
        limit = version - self._config.partial_versions
        for begun in self._left:
            ages = [e.oldest_version for e in begun.episodes if e.oldest_version is not None]
            if not begun.episodes or min(ages, default=limit) < limit:
                begun.episodes = self._episodes(begun.number, begun.prompt)

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {
            "prompts": self._stream.state_dict(),
            "drawn": self._drawn,
            "left": [
                {
                    "number": begun.number,
                    "cursor": begun.cursor,
                    "episodes": [episode.state() for episode in begun.episodes],
                }
                for begun in self._left
            ],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved one stood; completions with an environment are begun anew."""
        self._left = deque(self._restore(saved) for saved in state["left"])
        self._stream.load_state_dict(state["prompts"])
        self._drawn = state["drawn"]

    def _restore(self, saved: Mapping[str, Any]) -> _Begun:
        self._stream.load_state_dict(saved["cursor"])
        (prompt,) = self._stream.take(1)
        begun = _Begun(saved["number"], saved["cursor"], prompt, [])
        if all(part is not None for part in saved["episodes"]):
            begun.episodes = self._episodes(begun.number, prompt)
            for episode, part in zip(begun.episodes, saved["episodes"], strict=True):
                episode.restore(part)
        return begun

    def _next(self) -> _Begun:
        if self._left:
            return self._left.popleft()
        cursor = self._stream.state_dict()
        (prompt,) = self._stream.take(1)
        self._drawn += 1
        return _Begun(self._drawn, cursor, prompt, self._episodes(self._drawn, prompt))

    def _episodes(self, number: int, prompt: Prompt) -> list[Episode]:
        # The version is in the place, so that what is begun anew does not repeat itself.
        return self._sampler.episodes(
            prompt,
            sampling_params(self._config, self._sampler.stop_token_ids),
            samples_per_prompt=self._config.samples_per_prompt,
            place=(number, self._version),
        )

    async def _race(self, entries: list[_Begun], kept: dict[int, Group], useless: dict[int, Group]) -> None:
        wanted, halted = self._config.prompts_per_step, False
        tasks = [asyncio.create_task(self._group(begun, lambda: halted)) for begun in entries]
        stopped: list[_Begun] = []
        try:
            for finished in asyncio.as_completed(tasks):
                begun, group = await finished
                if group is None or len(kept) >= wanted:
                    stopped.append(begun)
                elif self._config.dynamic_sampling and not has_spread(group):
                    useless[begun.number] = group
                else:
                    kept[begun.number] = group
                    if len(kept) == wanted:
                        halted = True
                        await self._sampler.abort()
        finally:
            for task in tasks:
                task.cancel()
        for begun in sorted(stopped, key=lambda begun: -begun.number):
            if self._config.early_abort == "restart":
                begun.episodes = []
            self._left.appendleft(begun)

    async def _group(self, begun: _Begun, halted: Callable[[], bool]) -> tuple[_Begun, Group | None]:
        """The group, or None where it was stopped before."""
        await self._sampler.sample(begun.episodes, halted)
        if any(episode.finish is None for episode in begun.episodes):
            return begun, None
        (group,) = await self._sampler.score(begun.episodes)
        return begun, group


def has_spread(group: Group) -> bool:
    """Whether its rewards differ, so that it teaches something."""
    return nonzero_spread([member.result for member in group.members])
