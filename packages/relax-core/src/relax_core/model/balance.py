"""How evenly the experts are used: counts as metrics, and the auxiliary loss that evens them out.

Axes: T tokens of this rank, E experts, K experts of each token, L layers with experts.

The loss of one layer (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6, divided by K as Megatron does;
transformers' `load_balancing_loss_func` is K times this for one layer):

    E * sum_e f_e * mean_t p_te,    f_e = (tokens that chose e) / (K N),    mean over the N tokens that count

with p the softmax over all experts. It is 1 when the use is even, and the layers' losses are added. f and N
are those of *all* micro-batches and ranks of an optimizer step: the one choice that packing, micro-batches
and any layout leave unchanged, and the one that does not force each small micro-batch to be even by itself
(Qiu et al. 2025, arXiv 2501.11873). The gradient flows through p alone, so the loss is a term like any other,
sum(weight * value) / Z with value E sum_e f_e p_te and Z = N, whose f must be known before the first backward
pass. It is counted by one forward pass over the step without gradients, which only a coefficient above 0
costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from relax_kernels import upload

from relax_core.model.config import Qwen35Config
from relax_core.packing import PackedLayout

Place = tuple[int, int]
"""Which layer: (0, 1-based number) in the trunk, (k + 1, k + 1) in draft depth k, which looks k + 1 ahead."""


class LoadBalance:
    """The use of experts in one optimizer step, over all micro-batches and ranks.

    Args:
        places: every layer with experts of the whole model, on whichever rank.
        experts: E.
        top_k: K.
        tokens: for each distance ahead, how many tokens of the step's samples, over all ranks, have a token
            that far ahead in their sample.
        coefficient: weight of the loss; 0 only counts.
        device: where the counts are kept.
    """

    def __init__(
        self,
        places: Sequence[Place],
        experts: int,
        top_k: int,
        tokens: Sequence[float],
        coefficient: float,
        device: torch.device | str = "cpu",
    ) -> None:
        self.places = tuple(places)
        self.experts = experts
        self.top_k = top_k
        self.tokens = tuple(tokens)
        self.coefficient = coefficient
        self.device = torch.device(device)
        self.frequency: dict[Place, torch.Tensor] = {}
        self._passes: list[RoutingPass] = []

    @classmethod
    def of(
        cls,
        model: Qwen35Config,
        lengths: Sequence[int],
        *,
        depths: int,
        coefficient: float,
        device: torch.device | str,
    ) -> "LoadBalance | None":
        """That of one optimizer step; None for a model without experts.

        Args:
            model: sizes.
            lengths: tokens of every sample of the step, over all ranks.
            depths: draft layers that run.
            coefficient: weight of the loss.
            device: where the counts are kept.
        """
        if not model.experts:
            return None
        places = [(0, number + 1) for number in range(model.num_layers)]
        places += [(depth + 1, depth + 1) for depth in range(depths)]
        tokens = [float(sum(max(0, n - ahead) for n in lengths)) for ahead in range(depths + 1)]
        return cls(places, model.experts, model.experts_per_token, tokens, coefficient, device)

    def begin(self, layout: PackedLayout, tensor_group: Any) -> "RoutingPass":
        """One forward pass of one micro-batch, of the trunk or of the draft layers.

        Args:
            layout: where its samples lie.
            tensor_group: the tensor-parallel ranks over which sequence parallelism spreads the tokens, None
                if they all hold the same.
        """
        started = RoutingPass(self, layout, tensor_group)
        self._passes.append(started)
        return started

    def fix_frequencies(self) -> None:
        """Turns what was counted so far into f, and starts anew: call it after the counting pass."""
        counts_LE = self._gather("counts")
        self._passes = []
        for place, count_E in zip(self.places, counts_LE, strict=True):
            self.frequency[place] = count_E / max(1.0, self.top_k * self.tokens[place[0]])

    def metrics(self) -> dict[str, torch.Tensor]:
        """What the step's passes measured, the same on every rank; float64 [] each, on the device.

        Returns:
            `experts_load_max`: rows of the busiest expert over the mean, largest over the layers;
            `experts_load_mean`: the same, averaged over the layers; `experts_idle`: share of experts without
            a token; `balance_loss`: mean of the layers' losses, with a coefficient above 0.
        """
        # A draft layer has nothing to do where no sample is long enough.
        used = [row for row, place in enumerate(self.places) if self.tokens[place[0]]]
        if not used:
            return {}
        rows = None if len(used) == len(self.places) else upload(torch.tensor(used), self.device)

        def of_used(table: torch.Tensor) -> torch.Tensor:
            return table if rows is None else table[rows]

        counts_LE = of_used(self._gather("counts"))
        load_L = counts_LE.amax(1) / counts_LE.mean(1)
        values = {
            "experts_load_max": load_L.max(),
            "experts_load_mean": load_L.mean(),
            "experts_idle": (counts_LE == 0).double().mean(),
        }
        if self.coefficient:
            values["balance_loss"] = of_used(self._gather("losses")).mean()
        return values

    def _gather(self, what: str) -> torch.Tensor:
        """Sum over passes and ranks of a record, float64 [L, E] or [L]."""
        shape = (self.experts,) if what == "counts" else ()
        nothing = torch.zeros(shape, dtype=torch.float64, device=self.device)
        total = torch.zeros((len(self.places), *shape), dtype=torch.float64, device=self.device)
        for one in self._passes:
            records: dict[Place, torch.Tensor] = getattr(one, what)
            if records:
                rows = [records.get(place, nothing).double() for place in self.places]
                total += torch.stack(rows)
        dist.all_reduce(total)
        return total


@dataclass
class RoutingPass:
    """What the routers did in one forward pass; a pass that is computed again leaves the same record."""

    step: LoadBalance
    layout: PackedLayout
    tensor_group: Any
    counts: dict[Place, torch.Tensor] = field(default_factory=dict)
    losses: dict[Place, torch.Tensor] = field(default_factory=dict)
    _counted: dict[int, torch.Tensor] = field(default_factory=dict)

    def record(
        self, place: Place, logits_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """Counts the choices of one layer; returns its weights, whose backward pass adds the loss's gradient.

        Args:
            place: the layer.
            logits_TE: of the router.
            expert_TK: chosen experts.
            weight_TK: their weights.
        """
        counted_T = self._mask(place[0])
        ones_TK = counted_T.unsqueeze(1).expand_as(expert_TK).to(torch.int64)
        count_E = torch.zeros(self.step.experts, dtype=torch.int64, device=expert_TK.device)
        self.counts[place] = count_E.scatter_add_(0, expert_TK.flatten(), ones_TK.flatten())
        if place not in self.step.frequency:
            return weight_TK
        frequency_E = self.step.frequency[place].to(logits_TE)
        value_T = self.step.experts * (logits_TE.softmax(-1) @ frequency_E)
        share = (value_T * counted_T).sum() / max(1.0, self.step.tokens[place[0]])
        self.losses[place] = share.detach()
        attached: torch.Tensor = _Attach.apply(weight_TK, share * self.step.coefficient)  # type: ignore[no-untyped-call]
        return attached

    def _mask(self, ahead: int) -> torch.Tensor:
        """Which of this rank's tokens count, bool [T]."""
        if ahead not in self._counted:
            _index, valid_T = self.layout.ahead(ahead, self.step.device)
            valid_T = self.layout.local(valid_T)
            if self.tensor_group is not None:
                valid_T = valid_T.chunk(self.tensor_group.size())[self.tensor_group.rank()]
            self._counted[ahead] = valid_T
        return self._counted[ahead]


class _Attach(torch.autograd.Function):
    """Hands `x` on; in the backward pass `loss` gets the gradient 1, as if it had been added to the loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return dx, torch.ones_like(loss)
