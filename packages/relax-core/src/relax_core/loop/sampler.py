"""`Sampler`: prompts in, scored groups out."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from relax_rollout import Request, RolloutEngine, SamplingParams, derive_seed
from relax_rollout.filters import nonzero_spread
from relax_rollout.rewards import RewardInput

from relax_core.data import ExampleStream, Prompt
from relax_core.loop.config import RolloutConfig
from relax_core.loop.groups import Group, Scored
from relax_core.loop.rollout import Scorer

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


class Sampler:
    """Samples and scores completions.

    A completion depends on the weights, its prompt, `seed` and its place (step, round, prompt, member), never
    on what was sampled before: that is what makes a resumed run equal to an uninterrupted one.
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
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._recorder = recorder
        self.stop_token_ids = tuple(stop_token_ids)
        self._seed = seed

    async def batch(self, step: int, stream: ExampleStream[Prompt], config: RolloutConfig) -> Batch:
        """The groups of a step: one for each wanted prompt, or, with dynamic sampling, those with spread.

        Dynamic sampling draws new prompts for the groups it drops, at most `config.max_refills` times, and
        keeps groups in the order they were drawn (DAPO, arXiv 2503.14476, section 3.2).
        """
        wanted = config.prompts_per_step
        kept: list[Group] = []
        dropped = tokens = 0
        for attempt in range(config.max_refills + 1 if config.dynamic_sampling else 1):
            count = math.ceil((wanted - len(kept)) * config.over_sampling)
            groups = await self.groups(
                stream.take(count),
                SamplingParams(
                    max_new_tokens=config.max_new_tokens,
                    temperature=config.temperature,
                    top_p=config.top_p,
                    top_k=config.top_k,
                    stop_token_ids=self.stop_token_ids,
                ),
                samples_per_prompt=config.samples_per_prompt,
                place=(step, attempt),
            )
            tokens += sum(len(m.completion.token_ids) for group in groups for m in group.members)
            if not config.dynamic_sampling:
                return Batch(tuple(groups), 0, tokens)
            useful = [group for group in groups if nonzero_spread([m.result for m in group.members])]
            dropped += len(groups) - len(useful)
            kept += useful
            if len(kept) >= wanted:
                break
        if not kept:
            _log.warning("step %d: no group has any spread in its rewards; this step teaches nothing", step)
            kept = groups
        return Batch(tuple(kept[:wanted]), dropped, tokens)

    async def groups(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        samples_per_prompt: int,
        place: tuple[int, ...],
    ) -> list[Group]:
        """Samples `samples_per_prompt` completions of each prompt and scores them."""
        requests = [
            Request(
                id=".".join(map(str, (*place, index, member))),
                prompt_ids=prompt.prompt_ids,
                sampling=SamplingParams(
                    max_new_tokens=sampling.max_new_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    stop_token_ids=sampling.stop_token_ids,
                    seed=derive_seed(self._seed, *place, index, member),
                ),
            )
            for index, prompt in enumerate(prompts)
            for member in range(samples_per_prompt)
        ]
        with self._recorder.phase("rollout"):
            completions = await self._engine.generate(requests)
            texts = self._tokenizer.batch_decode(
                [completion.token_ids for completion in completions], skip_special_tokens=True
            )
        owners = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        with self._recorder.phase("reward"):
            results = await self._scorer.score(
                [
                    RewardInput(prompt.messages or prompt.prompt_text, text, prompt.answer, prompt.metadata)
                    for prompt, text in zip(owners, texts, strict=True)
                ]
            )
        scored = [Scored(*parts) for parts in zip(completions, texts, results, strict=True)]
        return [
            Group(prompt, tuple(scored[i * samples_per_prompt : (i + 1) * samples_per_prompt]))
            for i, prompt in enumerate(prompts)
        ]


class Stepwise:
    """Samples the groups of a step when the step asks for them.

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
        """See `Sampler.batch`."""
        return await self._sampler.batch(step, self._stream, self._config)

    async def advance(self, version: int) -> None:
        """Nothing is sampled ahead."""

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {"prompts": self._stream.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved stream stood."""
        self._stream.load_state_dict(state["prompts"])
