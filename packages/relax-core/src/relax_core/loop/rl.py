"""Reinforcement learning: sample, score, train, hand the weights over.

Axes: N completions of a batch, L tokens of one sequence.
"""

import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from relax_rollout import EngineError, SamplingParams
from relax_rollout.rewards import load_reward

from relax_core.config.root import RelaxConfig
from relax_core.data import DataSet, Prompt, load_prompts
from relax_core.data.chat import ChatRenderer
from relax_core.data.load import load_held_out_prompts
from relax_core.data.pictures import PictureReader, open_reader
from relax_core.loop.advantages import mean_advantages
from relax_core.loop.drive import StepResult
from relax_core.loop.environments.tools import tool_schemas
from relax_core.loop.environments.turns import Turns
from relax_core.loop.episode import EpisodeLimits
from relax_core.loop.evaluation import evaluation_metrics
from relax_core.loop.fit import refuse_unfit
from relax_core.loop.gap import check_gap
from relax_core.loop.groups import Group, rollout_metrics, sample_records, turn_metrics
from relax_core.loop.learning import Learner
from relax_core.loop.policy import Policy
from relax_core.loop.rollout import Rollout
from relax_core.loop.sampler import Dialogue, Phases, Sampler, TimeLimits
from relax_core.loop.session import Session
from relax_core.loop.stepwise import Racing, Stepwise
from relax_core.loop.stop_tokens import stop_token_ids
from relax_core.loop.streaming import Streaming, staleness_metrics
from relax_core.model.config import text_part
from relax_core.run import Recorder

_EVAL_ROUND = 2**31
T = TypeVar("T")


class SamplingError(ValueError):
    """The engine cannot sample from the present weights."""


@dataclass(frozen=True)
class Task:
    """What is asked.

    Attributes:
        data: the prompts.
        sets: held-out prompts by the name of their set; "" for the data's own.
        stop_token_ids: the tokens that end a turn.
        context: tokens that the model can look back on; None is no limit.
    """

    data: DataSet[Prompt]
    sets: Mapping[str, Sequence[Prompt]]
    stop_token_ids: tuple[int, ...]
    context: int | None


class _Unmeasured:
    """Sampling beside the trainer is no phase of a step."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


class RlLoop:
    """One step: a batch of groups, its optimizer steps, and the new weights in the engine."""

    def __init__(
        self,
        config: RelaxConfig,
        session: Session[Policy],
        recorder: Recorder,
        rollout: Rollout,
        task: Task,
    ) -> None:
        self._config = config
        self._session = session
        self._recorder = recorder
        self._learner = Learner(config, session.policy, recorder, rollout.runner)
        self._rollout = rollout
        self._sets = task.sets
        self._sampler = self._make_sampler(task, recorder)
        self._batches = self._make_batches(task)

    def _make_sampler(self, task: Task, phases: Phases) -> Sampler:
        config, tokenizer = self._config, self._session.tokenizer
        environment, dialogue = config.environment, None
        if self._rollout.environment is not None:
            turns = Turns(
                ChatRenderer.of(config.data, tokenizer), tokenizer, reply_tokens=environment.reply_tokens
            )
            # The calls of tools have limits of their own.
            limit = None if environment.name == "tools" else environment.timeout_s
            dialogue = Dialogue(self._rollout.environment, turns, limit)
        return Sampler(
            self._rollout.engine,
            self._rollout.scorer,
            tokenizer,
            phases,
            stop_token_ids=task.stop_token_ids,
            seed=config.run.seed,
            limits=EpisodeLimits(task.context, environment.max_turns, environment.turn_tokens),
            times=TimeLimits(config.rollout.request_timeout_s, config.rollout.group_timeout_s),
            dialogue=dialogue,
        )

    def _make_batches(self, task: Task) -> Stepwise | Racing | Streaming:
        config, stream = self._config, task.data.stream()
        if config.rollout.early_abort != "off":
            beside = self._make_sampler(task, _Unmeasured())
            return Racing(beside, stream, self._recorder, config.rollout)
        if not self._ahead:
            return Stepwise(self._sampler, stream, config.rollout)
        return Streaming(
            self._make_sampler(task, _Unmeasured()),
            stream,
            self._recorder,
            config.rollout,
            max_staleness=config.cluster.max_staleness,
            steps=config.run.steps,
        )

    @property
    def _ahead(self) -> bool:
        """Whether sampling goes on while the trainer trains."""
        return self._config.cluster.placement != "colocate"

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return self._rollout.runner.run(call)
        except EngineError as error:
            raise SamplingError(
                f"{error}. Earlier checkpoints stay; with a lower trainer.lr, or trainer.clip_grad "
                "at 1, weights do not overflow"
            ) from error

    def step(self, step: int) -> StepResult:
        """Samples, trains and updates the engine; `step` counts from 1."""
        batch = self._run(self._batches.take(step))
        with self._rollout.training():
            samples = self._learner.samples(batch.groups)
            with self._recorder.phase("train"):
                trained = self._learner.train(step, samples)
        metrics = rollout_metrics(batch.groups) | trained
        if "logprob_gap_mean" in metrics:
            check_gap(step, metrics, self._config.rollout)
        with self._recorder.phase("update"):
            began = time.perf_counter()
            self._serve(step)
            self._recorder.update_exposed = self._rollout.exposed(time.perf_counter() - began)
        self._recorder.gather(self._rollout.spans)
        counts: dict[str, float] = {"groups_dropped": batch.dropped, "rollout_tokens": batch.tokens}
        if self._ahead or self._config.rollout.early_abort == "continue":
            counts |= staleness_metrics(batch.groups, step)
        if self._config.environment.name is not None:
            counts |= turn_metrics(batch.groups)
        return StepResult(metrics | counts, sample_records(batch.groups, mean_advantages(samples)))

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out accuracy, reward and pass@k of every set; nothing if nothing is held out.

        No random number of the training is drawn: the completions' seeds come from their places.
        """
        metrics: dict[str, float] = {}
        for number, (name, prompts) in enumerate(self._sets.items()):
            if not prompts:
                continue
            with self._recorder.phase("eval"):
                groups = self._run(self._evaluated(prompts, (step, _EVAL_ROUND + number)))
            self._recorder.gather(self._rollout.spans)
            found = evaluation_metrics(groups, self._config.eval.pass_at)
            prefix = f"eval_{name}_" if name else "eval_"
            metrics |= {f"{prefix}{key}": value for key, value in found.items()}
        return metrics

    async def _evaluated(self, prompts: Sequence[Prompt], place: tuple[int, int]) -> list[Group]:
        config, rollout = self._config.eval, self._config.rollout
        return await self._sampler.groups(
            prompts[: config.max_prompts],
            SamplingParams(
                max_new_tokens=config.max_new_tokens or rollout.max_new_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                stop_token_ids=self._sampler.stop_token_ids,
            ),
            samples_per_prompt=config.samples_per_prompt,
            place=place,
        )

    def state(self) -> dict[str, Any]:
        """What `begin` needs beside the trainer's checkpoint."""
        return self._batches.state()

    def begin(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Goes on after `step`; from here on the engine serves the trainer's weights, which is checked."""
        if state is not None:
            self._batches.load(state)
        self._serve(step)

    def _serve(self, version: int) -> None:
        """The engines get the present weights, and prompts to sample from them."""
        self._run(self._session.policy.update(self._rollout.engine, version))
        self._run(self._batches.advance(version))


def open_task(config: RelaxConfig, session: Session[Policy], pictures: PictureReader | None = None) -> Task:
    """Reads the data, and its pictures with what reads these.

    Raises:
        DataError: the data cannot be read, or do not fit the model.
        ValueError: the checkpoint names no end-of-text token, or a tool cannot be used.
    """
    facts = text_part(session.source.config)
    vocab_size, context = int(facts["vocab_size"]), facts.get("max_position_embeddings")
    stops = stop_token_ids(session.source.path, session.tokenizer, vocab_size=vocab_size)
    tools = tool_schemas(config.environment.tools)
    data = load_prompts(config.data, session.tokenizer, seed=config.run.seed, tools=tools, pictures=pictures)
    sets = {"": data.held_out}
    for name, path in config.eval.sets.items():
        sets[name] = load_held_out_prompts(
            config.data, path, session.tokenizer, tools=tools, pictures=pictures
        )
    sampled = config.rollout.max_new_tokens
    for prompts in (data.train, *sets.values()):
        new = sampled if prompts is data.train else config.eval.max_new_tokens or sampled
        refuse_unfit(prompts, vocab_size=vocab_size, context=context, new_tokens=new)
    return Task(data, sets, stops, context)


@contextmanager
def open_rl(config: RelaxConfig, session: Session[Policy], recorder: Recorder) -> Iterator[RlLoop]:
    """Starts the engine and the reward, and ends them."""
    load_reward(config.reward.function)
    pictures = open_reader(config.data, session.source.path, session.source.config)
    with ExitStack() as stack:
        if pictures is not None:
            stack.callback(pictures.close)
        task = open_task(config, session, pictures)
        rollout = stack.enter_context(session.rollout())
        yield RlLoop(config, session, recorder, rollout, task)
