"""Supervised fine-tuning on the same trainer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from relax_core.config.root import RelaxConfig
from relax_core.data import Sample as Example
from relax_core.data import load_samples
from relax_core.data.pictures import open_reader
from relax_core.loop.batches import BatchesAhead
from relax_core.loop.drive import StepResult
from relax_core.loop.fit import refuse_unfit
from relax_core.loop.learning import split_groups
from relax_core.loop.metrics import LateMetrics
from relax_core.loop.objectives import SftObjective
from relax_core.loop.policy import Policy
from relax_core.loop.session import Session
from relax_core.model.config import text_part
from relax_core.run import Recorder
from relax_core.trainer.sample import Sample


class SftLoop:
    """One step: a batch of conversations and its optimizer steps."""

    def __init__(self, config: RelaxConfig, session: Session[Policy], recorder: Recorder) -> None:
        self._config = config
        self._session = session
        self._recorder = recorder
        self._pictures = open_reader(config.data, session.source.path, session.source.config)
        self._data = load_samples(
            config.data, session.tokenizer, seed=config.run.seed, pictures=self._pictures
        )
        for examples in (self._data.train, self._data.held_out):
            refuse_unfit(examples, vocab_size=int(text_part(session.source.config)["vocab_size"]))
        self._batches = BatchesAhead(
            self._data.stream(), _trainable, config.sft.samples_per_step, ahead=config.data.batches_ahead
        )

    def step(self, step: int) -> StepResult:
        """Trains on the next batch; `step` counts from 1."""
        samples = self._batches.take()
        objective = SftObjective(self._config.algorithm)
        with self._recorder.phase("train"):
            parts = split_groups(samples, self._config.trainer.optimizer_steps_per_batch)
            trained = [self._session.policy.step(part, objective) for part in parts]
        return StepResult(LateMetrics(trained))

    def evaluate(self, step: int) -> dict[str, float]:
        """Mean negative log-likelihood of held-out target tokens, and its exponential.

        Scored a batch at a time, as pictures of all that is held out may be more than memory.
        """
        held_out = self._data.held_out[: self._config.eval.max_prompts]
        size = self._config.sft.samples_per_step
        tokens, sums = 0, []
        with self._recorder.phase("eval"):
            for start in range(0, len(held_out), size):
                samples = _trainable(held_out[start : start + size])
                tokens += sum(int((sample.mask_L > 0).sum()) for sample in samples)
                sums += [float(score.double().sum()) for score in self._session.policy.score(samples)]
        if tokens == 0:
            return {}
        loss = -math.fsum(sums) / tokens
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}

    def state(self) -> dict[str, Any]:
        """What `begin` needs beside the trainer's checkpoint."""
        return {"samples": self._batches.state_dict()}

    def close(self) -> None:
        """Ends what makes batches ready, and removes pictures that nobody else is to find. Idempotent."""
        self._batches.close()
        if self._pictures is not None:
            self._pictures.close()

    def begin(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Goes on after `step`."""
        if state is not None:
            self._batches.load_state_dict(state["samples"])


@contextmanager
def open_sft(config: RelaxConfig, session: Session[Policy], recorder: Recorder) -> Iterator[SftLoop]:
    """The loop with its data read."""
    loop = SftLoop(config, session, recorder)
    with closing(loop):
        yield loop


def _trainable(examples: Sequence[Example]) -> list[Sample]:
    return [
        Sample(
            torch.from_numpy(example.ids).long(),
            torch.from_numpy(example.loss_mask).float(),
            group=number,
            pictures=tuple(one.load() for one in example.pictures),
        )
        for number, example in enumerate(examples)
    ]
