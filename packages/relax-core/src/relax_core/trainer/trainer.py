"""`Trainer`: one model and its optimizer; scores samples and turns mini-batches into weight updates.

Axes: L tokens of one sample, T packed positions, S scored positions, D hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from relax_core.loss import LossReducer, LossTerm
from relax_core.model import MtpConfig, Qwen35Model
from relax_core.packing import plan_micro_batches
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.objective import Terms, TrainingObjective
from relax_core.trainer.optimizer import Training, make_trainable
from relax_core.trainer.sample import MicroBatch, Sample


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step measured.

    Attributes:
        values: global means of every loss term, maxima, `loss`, `grad_norm`, `lr`, and per draft depth
            `mtp_loss_<k>` and `mtp_acceptance_<k>`.
        tokens: tokens trained on, prompts included.
    """

    values: dict[str, float]
    tokens: int


class Trainer:
    """Trains one model on one rank of one or more.

    Args:
        model: the model with its weights loaded, on `device`.
        config: optimizer, schedule, micro-batches and precision.
        mtp: draft layers' loss; needs `model` to have them when its coefficient counts.
        device: where the model lies.
        optimizer_steps: length of the learning-rate schedule.
    """

    def __init__(
        self,
        model: Qwen35Model,
        config: TrainerConfig,
        mtp: MtpConfig,
        *,
        device: torch.device,
        optimizer_steps: int,
    ) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.mtp = mtp
        if model.mtp_depths and mtp.loss_coefficient == 0:
            # Weight decay would shrink them all the same.
            model.mtp.requires_grad_(False)
        self.training: Training = make_trainable(model, config, optimizer_steps=optimizer_steps)

    @torch.no_grad()
    def score(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, model: Qwen35Model | None = None
    ) -> list[Tensor]:
        """Log-probs of every target token under the current weights, or those of another `model`.

        Returns:
            float32 [L] on the host for each sample, 0 where the mask is 0.
        """
        model = model or self.model
        scores = [torch.zeros(len(sample.tokens_L)) for sample in samples]
        for members in self._plan(samples):
            batch = MicroBatch.pack(samples, members, self.device)
            hidden_TD = model(batch.tokens_T, batch.layout)
            scored = model.token_logprobs(hidden_TD[batch.scored_S], batch.targets_S, temperature=temperature)
            logprob_T = torch.zeros(batch.layout.padded_total)
            logprob_T[batch.scored_S.cpu() + 1] = scored.logprob_T.float().cpu()
            for i, own in zip(members, batch.layout.unpack(logprob_T), strict=True):
                scores[i].copy_(own)
        return scores

    def step(self, samples: Sequence[Sample], objective: TrainingObjective) -> StepMetrics:
        """One optimizer step on a mini-batch, in as many micro-batches as the token budget asks for.

        Raises:
            NonFiniteGradientError: the gradient holds inf or NaN; the weights are as before.
        """
        prepared = objective.prepare(samples)
        samples = prepared.samples
        depths = self._draft_depths()
        reducer = LossReducer({**prepared.denominators, **_draft_denominators(samples, depths)})
        plan = self._plan(samples)
        batches = (MicroBatch.pack(samples, members, self.device) for members in plan)

        self.training.model.train()
        self.training.model.zero_grad_buffer()
        self.training.optimizer.zero_grad()
        reports: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, objective=objective, reducer=reducer),
            data_iterator=batches,
            model=[self.training.model],
            num_microbatches=len(plan),
            seq_length=self.config.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        grad_norm, lr = self.training.step()
        values = _gather_reports(reports)
        return StepMetrics(
            {**values, "grad_norm": grad_norm, "lr": lr}, tokens=sum(len(s.tokens_L) for s in samples)
        )

    def _plan(self, samples: Sequence[Sample]) -> list[list[int]]:
        (plan,) = plan_micro_batches([len(s.tokens_L) for s in samples], self.config.micro_batch_tokens)
        return plan

    def _draft_depths(self) -> range:
        return range(self.model.mtp_depths if self.mtp.loss_coefficient > 0 else 0)

    def _forward_step(
        self, batches: Iterator[MicroBatch], model: Any, *, objective: TrainingObjective, reducer: LossReducer
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        batch = next(batches)
        hidden_TD = model(batch.tokens_T, batch.layout)
        return hidden_TD, partial(self._loss, batch=batch, objective=objective, reducer=reducer)

    def _loss(
        self, hidden_TD: Tensor, *, batch: MicroBatch, objective: TrainingObjective, reducer: LossReducer
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        scored = self.model.token_logprobs(
            hidden_TD[batch.scored_S],
            batch.targets_S,
            temperature=objective.temperature,
            with_entropy=objective.with_entropy,
        )
        terms: Terms = objective.terms(scored, batch.columns_S)
        drafts = self._draft_terms(hidden_TD, batch, scored.logprob_T, objective.temperature)
        loss, shares = reducer.reduce([*terms.terms, *drafts])
        maxima = {f"{name}_max": value.detach() for name, value in terms.maxima.items()}
        # The count only feeds Megatron's own division, which is off.
        return loss, loss.new_zeros((), dtype=torch.int), {"loss": loss.detach(), **shares, **maxima}

    def _draft_terms(
        self, hidden_TD: Tensor, batch: MicroBatch, logprob_S: Tensor, temperature: float
    ) -> Iterator[LossTerm]:
        """Loss of each draft layer, and how often rejection sampling would keep what it proposes.

        A proposal x ~ q is kept with probability min(1, p(x) / q(x)), p the trunk's distribution (Leviathan
        et al. 2023, arXiv 2211.17192, section 2.3): sum_x min(p(x), q(x)) on average, which is also the mean
        of min(1, q(x) / p(x)) over x ~ p. Its mean over the given tokens is the teacher-forced acceptance:
        unbiased where the policy sampled them, an indication on other text.
        """
        depths = self._draft_depths()
        if not depths:
            return
        trunk_T = logprob_S.new_zeros(batch.layout.padded_total).index_copy(
            0, batch.scored_S + 1, logprob_S.detach()
        )
        for depth, draft_TD in zip(
            depths, self.model.mtp_hidden(hidden_TD, batch.tokens_T, batch.layout), strict=True
        ):
            positions, targets, weights = batch.draft_targets(depth)
            draft = self.model.token_logprobs(
                draft_TD[positions], targets, temperature=temperature, detach_head=self.mtp.detach_head
            ).logprob_T
            kept = (draft.detach() - trunk_T[positions + depth + 2]).clamp(max=0).exp()
            yield LossTerm(_draft("loss", depth), -draft, weights, self.mtp.loss_coefficient / len(depths))
            yield LossTerm(_draft("acceptance", depth), kept, weights, coefficient=0)


def _draft(what: str, depth: int) -> str:
    return f"mtp_{what}_{depth}"


def _draft_denominators(samples: Sequence[Sample], depths: range) -> dict[str, float]:
    """Z of each draft layer: the loss mask over tokens that have `depth + 2` tokens before them."""
    counts: dict[str, float] = {}
    for depth in depths:
        total = float(sum(sample.mask_L[depth + 2 :].sum() for sample in samples))
        counts[_draft("loss", depth)] = counts[_draft("acceptance", depth)] = total
    return counts


def _gather_reports(reports: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Sums shares and takes the largest of maxima over the micro-batches of a step."""
    values: dict[str, float] = {}
    for name in reports[0]:
        column = torch.stack([report[name].double() for report in reports])
        values[name] = float(column.max() if name.endswith("_max") else column.sum())
    return values
