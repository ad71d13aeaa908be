"""Sampling ahead of the trainer: groups come in the order of their prompts, none too old."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.data import ExampleStream, Prompt
from relax_core.loop.config import RolloutConfig
from relax_core.loop.groups import Group, group_state, restore_group
from relax_core.loop.sampler import Batch, Sampler
from relax_core.loop.stepwise import has_spread, sampling_params
from relax_core.run import Recorder

_ROUND = 2**31 + 1


@dataclass(frozen=True)
class _Entry:
    """A prompt that was drawn: its number, the stream before it was, and the group to come."""

    number: int
    cursor: dict[str, Any]
    group: asyncio.Task[Group]


class Streaming:
    """A bounded queue of groups that are being sampled while the trainer trains.

    Prompt n is drawn once n < (version + max_staleness + 1) * prompts_per_step + groups dropped. Groups are
    handed out in that order, so that the one of prompt n is trained in step n' // prompts_per_step (counted
    from 0, n' without the dropped ones before n), at most `max_staleness` versions after it was begun. Every
    prompt is handed out once: what is in the queue when a checkpoint is written is in the checkpoint,
    finished groups with their completions, the others to be sampled again.

    All coroutines run on one event loop, which must go on while the trainer trains.

    Args:
        sampler: samples and scores; measures no phases.
        stream: gives prompts.
        recorder: is told of the wait.
        config: of sampling.
        max_staleness: in versions.
        steps: of the run; nothing is sampled for later ones.
    """

    def __init__(
        self,
        sampler: Sampler,
        stream: ExampleStream[Prompt],
        recorder: Recorder,
        config: RolloutConfig,
        *,
        max_staleness: int,
        steps: int,
    ) -> None:
        self._sampler = sampler
        self._stream = stream
        self._recorder = recorder
        self._config = config
        self._max_staleness = max_staleness
        self._steps = steps
        self._queue: deque[_Entry] = deque()
        self._next = self._version = self._dropped = 0
        self._finished: dict[int, list[dict[str, Any]]] = {}

    async def take(self, step: int) -> Batch:
        """The groups of a step, as they were drawn; with dynamic sampling, those with spread.

        As long as fewer than `max_refills` batches were dropped others are drawn for them.
        """
        wanted = self._config.prompts_per_step
        kept: list[Group] = []
        dropped = tokens = 0
        with self._recorder.phase("rollout"):
            while len(kept) < wanted:
                group = await self._queue[0].group
                self._queue.popleft()
                tokens += group.drawn_count
                exhausted = dropped >= self._config.max_refills * wanted
                if has_spread(group) or exhausted or not self._config.dynamic_sampling:
                    kept.append(group)
                else:
                    dropped += 1
                    self._dropped += 1
                    self._draw()
        return Batch(tuple(kept), dropped, tokens)

    async def advance(self, version: int) -> None:
        """The engines serve `version` from here on: draws the prompts that may be begun under it."""
        self._version = version
        self._draw()

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {
            "prompts": self._queue[0].cursor if self._queue else self._stream.state_dict(),
            "next": self._queue[0].number if self._queue else self._next,
            "dropped": self._dropped,
            "finished": {
                entry.number: group_state(entry.group.result())
                for entry in self._queue
                if entry.group.done() and not entry.group.cancelled() and entry.group.exception() is None
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved queue stood; `advance` draws its prompts."""
        self._stream.load_state_dict(state["prompts"])
        self._next, self._dropped = state["next"], state["dropped"]
        self._finished = dict(state["finished"])

    def _draw(self) -> None:
        ahead = min(self._version + self._max_staleness + 1, self._steps)
        limit = ahead * self._config.prompts_per_step + self._dropped
        while self._next < limit:
            cursor = self._stream.state_dict()
            (prompt,) = self._stream.take(1)
            task = asyncio.get_running_loop().create_task(self._group(self._next, prompt))
            self._queue.append(_Entry(self._next, cursor, task))
            self._next += 1

    async def _group(self, number: int, prompt: Prompt) -> Group:
        finished = self._finished.pop(number, None)
        if finished is not None:
            return restore_group(prompt, finished)
        config = self._config
        (group,) = await self._sampler.groups(
            [prompt],
            sampling_params(config, self._sampler.stop_token_ids),
            samples_per_prompt=config.samples_per_prompt,
            place=(number, _ROUND),
        )
        return group


def staleness_metrics(groups: tuple[Group, ...], step: int) -> dict[str, float]:
    """How many versions older than the weights trained in `step` the completions' tokens are.

    Returns:
        `staleness_mean` over tokens; `staleness_max` of any token; `mixed_fraction`, the share of completions
        whose tokens are of several versions.
    """
    rows = [member.trajectory.drawn_versions for group in groups for member in group.members]
    ages = [step - 1 - version for row in rows for version in row]
    if not ages:
        return {}
    return {
        "staleness_mean": sum(ages) / len(ages),
        "staleness_max": max(ages),
        "mixed_fraction": sum(len(set(row)) > 1 for row in rows) / len(rows),
    }
