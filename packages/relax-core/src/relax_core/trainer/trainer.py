"""`Trainer`: one model and its optimizer; scores samples and turns mini-batches into weight updates.

Axes: L tokens of one sample, B tokens of all samples end to end, T packed positions, S scored positions, D
hidden.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import tee
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from relax_kernels import upload
from torch import Tensor

from relax_core.algorithms import Sequences
from relax_core.device import ParallelConfig
from relax_core.device.readback import Readback
from relax_core.loss import LossReducer
from relax_core.model import LoadBalance, MtpConfig, Qwen35Model
from relax_core.model.cost import sample_cost
from relax_core.model.linear import is_adapter
from relax_core.packing import plan_micro_batches
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.drafts import draft_denominators, draft_terms
from relax_core.trainer.objective import Terms, TrainingObjective
from relax_core.trainer.optimizer import NonFiniteGradientError, Training, make_trainable
from relax_core.trainer.places import BatchPlaces
from relax_core.trainer.ranks import Ranks, Totals
from relax_core.trainer.sample import MicroBatch, Sample
from relax_core.trainer.step_metrics import StepMetrics

Chunks = Qwen35Model | Sequence[Qwen35Model]


class Trainer:
    """Trains one model, or this rank's share of it.

    Every rank is given the same samples, so that all know every count before the first backward pass; each
    takes its own part of them.

    Args:
        model: the model with its weights loaded, on `device`; all pieces that this rank holds, in order.
        config: optimizer, schedule, micro-batches and precision.
        mtp: draft layers' loss; needs `model` to have them when its coefficient counts.
        device: where the model lies.
        optimizer_steps: length of the learning-rate schedule.
        parallel: the sizes that `initialise` was given; all 1 when None.
    """

    def __init__(
        self,
        model: Chunks,
        config: TrainerConfig,
        mtp: MtpConfig,
        *,
        device: torch.device,
        optimizer_steps: int,
        parallel: ParallelConfig | None = None,
    ) -> None:
        self.chunks = _chunks(model)
        self.config = config
        self.device = device
        self.mtp = mtp
        _check_drafts(self.chunks[-1], mtp, config)
        self.ranks = Ranks.here(parallel)
        last = self.chunks[-1]
        if last.mtp_depths and mtp.loss_coefficient == 0:
            # Weight decay would shrink them all the same.
            last.mtp.requires_grad_(False)
        if mtp.only:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
            if last.mtp_depths:
                adapted = last.config.lora is not None
                for name, parameter in last.mtp.named_parameters():
                    parameter.requires_grad_(is_adapter(name) or not adapted)
        self.training: Training = make_trainable(self.chunks, config, optimizer_steps=optimizer_steps)

    @property
    def model(self) -> Qwen35Model:
        """The only piece of the layers on this rank.

        Raises:
            ValueError: there are several.
        """
        (chunk,) = self.chunks
        return chunk

    @torch.no_grad()
    def score(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, model: Chunks | None = None
    ) -> list[Tensor]:
        """Log-probs of every target token under the current weights, or those of another `model`.

        Returns:
            float32 [L] on the host for each sample, 0 where the mask is 0; the same on every rank.
        """
        chunks = self.chunks if model is None else _chunks(model)
        found_B = self._score(samples, chunks, temperature=temperature).cpu()
        return list(torch.split(found_B, [len(s.tokens_L) for s in samples]))

    @torch.no_grad()
    def _score(
        self, samples: Sequence[Sample], chunks: Sequence[Qwen35Model], *, temperature: float
    ) -> Tensor:
        """`score` as float32 [B] on the device, which is not waited for."""
        places = BatchPlaces(samples, self.device)
        found_B = torch.zeros(places.total, device=self.device)
        for chunk in chunks:
            chunk.eval()

        def keep(hidden_TD: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            scored = chunks[-1].token_logprobs(
                hidden_TD[batch.scored_S], batch.targets_S, temperature=temperature, all_targets=True
            )
            found_B.index_copy_(0, places.of_predicted(batch), scored.logprob_T.float())
            return hidden_TD.new_zeros(()), torch.zeros((), dtype=torch.int), {}

        self._run(samples, chunks, keep, draft_depths=0, forward_only=True)
        if self.ranks.last_stage:
            self.ranks.add_over_data(found_B)
        return self.ranks.broadcast_from_last_stage(found_B)

    def step(self, samples: Sequence[Sample], objective: TrainingObjective) -> StepMetrics:
        """One optimizer step on a mini-batch, in as many micro-batches as the token budget asks for.

        Nothing is read from the device (but the sizes of an exchange of experts' rows): the host may prepare
        and queue the next step before it looks at the `values` of this one. A gradient that is not finite
        changes no weight; the `values` of its step raise NonFiniteGradientError.
        """
        logprob_B = None
        if objective.needs_scores:
            logprob_B = self._score(samples, self.chunks, temperature=objective.temperature)
        prepared = objective.prepare(samples, logprob_B)
        samples = prepared.samples
        columns_B = {name: upload(x_B, self.device) for name, x_B in prepared.batch_columns.items()}
        places = BatchPlaces(samples, self.device)
        depths = self._draft_depths
        reducer = LossReducer({**prepared.denominators, **draft_denominators(samples, depths)})
        balance = self._balance(samples, depths)
        self.training.begin()
        if balance is not None and balance.coefficient:
            with torch.no_grad():
                count = partial(self._count, balance=balance)
                self._run(
                    samples, self.chunks, count, draft_depths=depths, forward_only=True, balance=balance
                )
            balance.fix_frequencies()
        reports = self._run(
            samples,
            self.training.chunks,
            partial(
                self._loss,
                objective=objective,
                reducer=reducer,
                balance=balance,
                columns_of=partial(places.columns, columns_B),
            ),
            draft_depths=depths,
            # Draft layers alone lie on the last stage, which takes their gradient as it goes.
            forward_only=self.mtp.only,
            balance=balance,
        )
        if self.mtp.only:
            self.training.reduce()
        norm = self.training.grad_norm()
        # Copied before the weights move: the numbers are there while the device still updates them.
        arriving = _StepValues(
            Totals(reports, self.ranks, self.device),
            balance.metrics() if balance else {},
            norm,
            self.training,
        )
        arriving.lr = self.training.step(norm)
        lengths = [len(s.tokens_L) for s in samples]
        return StepMetrics(
            arriving,
            tokens=sum(lengths),
            flops=6 * sum(map(sample_cost(self.chunks[-1].model_config), lengths)),
        )

    def _run(
        self,
        samples: Sequence[Sample],
        chunks: Sequence[Any],
        loss: Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]],
        *,
        draft_depths: int,
        forward_only: bool = False,
        balance: LoadBalance | None = None,
    ) -> list[Mapping[str, Tensor]]:
        """All micro-batches of this rank through Megatron's schedule; what `loss` reported of each."""
        spaces = self.config.spaces([len(s.tokens_L) for s in samples])
        plan = self._plan(spaces)
        parallel = self.ranks.parallel
        multiple = parallel.row_multiple
        if parallel.pipeline > 1:
            # Stages exchange tensors of one shape; asking for the shape of each would stall the device.
            multiple = _longest_row(spaces, plan, multiple)
        packed = (
            MicroBatch.pack(
                samples,
                members,
                self.device,
                pad_to_multiple=multiple,
                context_size=parallel.context,
                context_rank=self.ranks.context_rank,
                draft_depths=draft_depths,
                row_length=spaces[0] if self.config.packing == "bshd" else None,
            )
            for members in plan
        )
        iterators = list(tee(packed, len(chunks)))

        def forward(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.mtp.only):
                hidden = model(
                    batch.tokens_T,
                    batch.layout,
                    balance=balance if batch.members else None,
                    pictures=batch.pictures,
                )
            return hidden, partial(loss, batch=batch)

        reports: list[Mapping[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(plan),
            seq_length=multiple,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return reports

    def _plan(self, spaces: Sequence[int]) -> list[list[int]]:
        """This rank's micro-batches; equally many on every rank, so that some may be empty.

        Args:
            spaces: positions that each sample takes.
        """
        parallel = self.ranks.parallel
        plan = plan_micro_batches(
            spaces,
            self.config.micro_batch_tokens,
            ranks=self.ranks.data_size,
            multiple_of=parallel.pipeline if parallel.pipeline_chunks > 1 else 1,
            cost=sample_cost(self.chunks[-1].model_config),
        )
        return plan[self.ranks.data_rank]

    @property
    def _draft_depths(self) -> int:
        return self.chunks[-1].depths if self.mtp.loss_coefficient > 0 else 0

    def _balance(self, samples: Sequence[Sample], depths: int) -> LoadBalance | None:
        return LoadBalance.of(
            self.chunks[-1].model_config,
            [len(s.tokens_L) for s in samples],
            depths=depths,
            coefficient=self.config.balance_coefficient,
            device=self.device,
        )

    def _count(
        self, hidden_TD: Tensor, *, batch: MicroBatch, balance: LoadBalance
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Lets the draft layers choose their experts, as the trunk did; there is no loss."""
        tokens = [draft.tokens_T for draft in batch.drafts]
        if tokens:
            counting = balance if batch.members else None
            self.chunks[-1].mtp_hidden(
                hidden_TD, tokens, batch.layout, balance=counting, pictures=batch.pictures
            )
        return hidden_TD.new_zeros(()), torch.zeros((), dtype=torch.int), {}

    def _loss(
        self,
        hidden_TD: Tensor,
        *,
        batch: MicroBatch,
        objective: TrainingObjective,
        reducer: LossReducer,
        balance: LoadBalance | None,
        columns_of: Callable[[MicroBatch], Mapping[str, Tensor]],
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = self.chunks[-1]
        scored = model.token_logprobs(
            hidden_TD[batch.scored_S],
            batch.targets_S,
            temperature=objective.temperature,
            with_entropy=objective.with_entropy,
            all_targets=True,
        )
        sequences = Sequences(batch.sequence_S, max(1, len(batch.members)), self.ranks.add_over_context)
        terms: Terms = objective.terms(scored, columns_of(batch), sequences)
        drafts = draft_terms(
            model,
            hidden_TD,
            batch,
            scored.logprob_T,
            mtp=self.mtp,
            temperature=objective.temperature,
            ranks=self.ranks,
            balance=balance if batch.members else None,
        )
        trunk = [replace(term, coefficient=0.0) for term in terms.terms] if self.mtp.only else terms.terms
        loss, shares = reducer.reduce([*trunk, *drafts])
        if self.mtp.only:
            loss.backward()  # type: ignore[no-untyped-call]
        maxima = {f"{name}_max": value.detach() for name, value in terms.maxima.items()}
        # The count only feeds Megatron's own division, which is off.
        return loss, loss.new_zeros((), dtype=torch.int), {"loss": loss.detach(), **shares, **maxima}


class _StepValues:
    """What a step measured, on its way to the host.

    Attributes:
        lr: the learning rate, known on the host.
    """

    lr: float

    def __init__(
        self, totals: Totals, balance: Mapping[str, Tensor], norm: Tensor, training: Training
    ) -> None:
        self._totals = totals
        self._names = [*balance, "grad_norm"]
        self._training = training
        self._arriving = Readback(totals.tensor, torch.stack([*balance.values(), norm]))
        self._refusal: NonFiniteGradientError | None = None

    @property
    def ready(self) -> bool:
        return self._arriving.ready

    def read(self) -> dict[str, float]:
        totals, rest = self._arriving.read()
        values = self._totals.read(totals) | dict(zip(self._names, rest.tolist(), strict=True))
        if self._refusal is None:
            try:
                self._training.refuse_non_finite(values["grad_norm"])
            except NonFiniteGradientError as refusal:
                self._refusal = refusal
        if self._refusal is not None:
            raise self._refusal
        return {**values, "lr": self.lr}


def _check_drafts(model: Qwen35Model, mtp: MtpConfig, config: TrainerConfig) -> None:
    if not mtp.only:
        return
    if not model.depths or mtp.loss_coefficient == 0:
        raise ValueError(
            f"mtp.only trains draft layers alone, but the model has {model.depths} draft depths and "
            f"mtp.loss_coefficient is {mtp.loss_coefficient:g}: use a checkpoint with draft layers and a "
            "coefficient above 0, or set mtp.only to false"
        )
    if config.overlap_grad_reduce:
        raise ValueError(
            "mtp.only is true and trainer.overlap_grad_reduce too: the few gradients of draft layers are not "
            "overlapped; set overlap_grad_reduce and overlap_param_gather to false"
        )


def _chunks(model: Chunks) -> list[Qwen35Model]:
    return [model] if isinstance(model, Qwen35Model) else list(model)


def _longest_row(spaces: Sequence[int], plan: Sequence[Sequence[int]], multiple: int) -> int:
    """Positions of the longest row of a plan, rounded up to `multiple`."""
    longest = max(1, *(sum(spaces[i] for i in members) for members in plan), 1)
    return -(-longest // multiple) * multiple
