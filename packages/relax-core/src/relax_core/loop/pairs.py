"""Learning from pairs of a better and a worse completion."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from relax_core.config.root import RelaxConfig
from relax_core.data import Pair, load_pairs
from relax_core.data.pictures import open_reader
from relax_core.loop.drive import StepResult
from relax_core.loop.fit import refuse_unfit
from relax_core.loop.learning import split_groups
from relax_core.loop.metrics import LateMetrics
from relax_core.loop.policy import Policy
from relax_core.loop.preferences import PreferenceObjective, preferences
from relax_core.loop.session import Session
from relax_core.model.config import text_part
from relax_core.run import Recorder
from relax_core.trainer.sample import Sample


class PairsLoop:
    """One step: a batch of pairs and its optimizer steps."""

    def __init__(self, config: RelaxConfig, session: Session[Policy], recorder: Recorder) -> None:
        self._config = config
        self._session = session
        self._recorder = recorder
        self._pictures = open_reader(config.data, session.source.path, session.source.config)
        self._data = load_pairs(config.data, session.tokenizer, seed=config.run.seed, pictures=self._pictures)
        for pairs in (self._data.train, self._data.held_out):
            refuse_unfit(pairs, vocab_size=int(text_part(session.source.config)["vocab_size"]))
        self._stream = self._data.stream()

    def step(self, step: int) -> StepResult:
        """Trains on the next batch; `step` counts from 1."""
        samples = _trainable(self._stream.take(self._config.sft.samples_per_step))
        objective = PreferenceObjective(self._config.algorithm)
        with self._recorder.phase("logprob"):
            samples = self._with_reference(samples)
        with self._recorder.phase("train"):
            parts = split_groups(samples, self._config.trainer.optimizer_steps_per_batch)
            trained = [self._session.policy.step(part, objective) for part in parts]
        return StepResult(LateMetrics(trained))

    def evaluate(self, step: int) -> dict[str, float]:
        """Loss and accuracy of held-out pairs, scored a batch at a time as `SftLoop` does."""
        held_out = self._data.held_out[: self._config.eval.max_prompts]
        if not held_out:
            return {}
        size, beta = self._config.sft.samples_per_step, self._config.algorithm.preference_beta
        found = []
        with self._recorder.phase("eval"):
            for start in range(0, len(held_out), size):
                samples = self._with_reference(_trainable(held_out[start : start + size]))
                scores = self._session.policy.score(samples)
                found.append(preferences(samples, torch.cat(scores), beta=beta))
        return {
            "eval_loss": float(torch.cat([one.loss_P for one in found]).mean()),
            "eval_accuracy": float((torch.cat([one.margin_P for one in found]) > 0).double().mean()),
        }

    def state(self) -> dict[str, Any]:
        """What `begin` needs beside the trainer's checkpoint."""
        return {"pairs": self._stream.state_dict()}

    def begin(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Goes on after `step`."""
        if state is not None:
            self._stream.load_state_dict(state["pairs"])

    def close(self) -> None:
        """Removes pictures that nobody else is to find. Idempotent."""
        if self._pictures is not None:
            self._pictures.close()

    def _with_reference(self, samples: Sequence[Sample]) -> list[Sample]:
        scores = self._session.policy.score(samples, of="reference")
        return [s.with_columns(ref_logprob=score) for s, score in zip(samples, scores, strict=True)]


@contextmanager
def open_pairs(config: RelaxConfig, session: Session[Policy], recorder: Recorder) -> Iterator[PairsLoop]:
    """The loop with its data read."""
    loop = PairsLoop(config, session, recorder)
    with closing(loop):
        yield loop


def _trainable(pairs: Sequence[Pair]) -> list[Sample]:
    return [
        Sample(
            torch.from_numpy(example.ids).long(),
            torch.from_numpy(example.loss_mask).float(),
            group=number,
            pictures=tuple(one.load() for one in example.pictures),
        )
        for number, pair in enumerate(pairs)
        for example in (pair.chosen, pair.rejected)
    ]
