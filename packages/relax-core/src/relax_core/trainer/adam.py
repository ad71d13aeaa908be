"""`Adam`: AdamW as Megatron's distributed optimizer drives it, with as few bytes per weight as wanted.

Megatron has a path for optimizers that keep the float32 weights themselves (its "precision-aware" one, made
for Transformer Engine's). This one takes that path on every device: gradients are read where data
parallelism left them, of any dtype; a bfloat16 weight is completed to float32 by 16 more bits instead of a
copy of 32. Bytes per bfloat16 weight, gradient included: 16 with float32 gradients and states, 10 with
bfloat16 ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from relax_kernels import AdamShard, AdamShards, adamw_steps, join_float32, split_float32
from torch import Tensor

_MASTER = "master_param"


class Place(NamedTuple):
    """What decides how the states of a shard are rounded: the same however ranks share its weight.

    Attributes:
        seed: of the weight.
        first: place of the shard's first element in the weight.
    """

    seed: int
    first: int


class Adam(torch.optim.Optimizer):
    """AdamW; its state is there from the start.

    Attributes:
        grad_scale: factor of all gradients in the next step; clipping sets it, at no cost. A tensor that
            holds NaN leaves the step out.

    Args:
        groups: parameter groups: "params", "lr", "weight_decay", "betas", "eps" and whatever their owner
            keeps there.
        places: of every parameter.
        state_dtype: of both running means, torch.float32 or torch.bfloat16.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], places: Mapping[Tensor, Place], *, state_dtype: torch.dtype
    ) -> None:
        # Megatron's shards are views, which torch refuses as parameters when it is asked.
        super().__init__([torch.zeros(0)], {})
        self.param_groups = [{**group, "step": group.get("step", 0)} for group in groups]
        self.places = places
        self.grad_scale: float | Tensor = 1.0
        self._known: dict[int, tuple[list[int], list[AdamShards]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                # A weight that is float32 itself is its own master.
                rest = torch.zeros_like(parameter, dtype=torch.int16) if _split(parameter) else None
                self.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter, dtype=state_dtype),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=state_dtype),
                    _MASTER: parameter.detach() if rest is None else rest,
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step on `decoupled_grad` of every parameter, where Megatron puts the gradient."""
        for number, group in enumerate(self.param_groups):
            group["step"] += 1
            for shards in self._shards(number):
                adamw_steps(
                    shards,
                    step=group["step"],
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    grad_scale=self.grad_scale,
                )
        self.grad_scale = 1.0

    def take_back(self) -> None:
        """Counts one step less: one that was left out."""
        for group in self.param_groups:
            group["step"] -= 1

    def _shards(self, number: int) -> list[AdamShards]:
        """What one group updates, by dtype; put together again only if tensors lie elsewhere than before."""
        parameters = self.param_groups[number]["params"]
        addresses = [
            tensor.data_ptr()
            for parameter in parameters
            for tensor in (parameter, parameter.decoupled_grad, *self.state[parameter].values())
        ]
        known = self._known.get(number)
        if known is None or known[0] != addresses:
            shards = [self._shard(parameter) for parameter in parameters]
            kinds: dict[torch.dtype, list[AdamShard]] = {shard.weight_N.dtype: [] for shard in shards}
            for shard in shards:
                kinds[shard.weight_N.dtype].append(shard)
            known = self._known[number] = addresses, [AdamShards(kind) for kind in kinds.values()]
        return known[1]

    def _shard(self, parameter: Tensor) -> AdamShard:
        state, place = self.state[parameter], self.places[parameter]
        return AdamShard(
            parameter.detach(),
            cast(Tensor, parameter.decoupled_grad),  # type: ignore[attr-defined]
            state["exp_avg"],
            state["exp_avg_sq"],
            state[_MASTER] if _split(parameter) else None,
            place.seed,
            place.first,
        )

    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        """A state in float32; `master_param` is the float32 weight (called by Megatron to save)."""
        stored = cast(Tensor, self.state[parameter][name])
        if name == _MASTER and _split(parameter):
            return join_float32(parameter.detach(), stored)
        return stored.float()

    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Takes a state in float32 (called by Megatron to load)."""
        if name == _MASTER and _split(parameter):
            upper, value = split_float32(value.to(parameter.device, torch.float32))
            parameter.detach().copy_(upper)
        self.state[parameter][name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Settings and step count of the groups; each state with the count, as Megatron wants to see it."""
        groups, number = [], 0
        states: dict[int, dict[str, Any]] = {}
        for group in self.param_groups:
            count = len(group["params"])
            groups.append({**group, "params": list(range(number, number + count))})
            for parameter in group["params"]:
                states[number] = {**self.state[parameter], "step": torch.tensor(float(group["step"]))}
                number += 1
        step = float(self.param_groups[0]["step"])
        return {"state": states or {-1: {"step": torch.tensor(step)}}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the groups' settings and step count; the states come through `set_scaled_state`."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
            group["step"] = int(group["step"])


def shard_places(optimizer: Any, chunks: Sequence[Any]) -> dict[Tensor, Place]:
    """Places of all shards in one of Megatron's distributed optimizers of the model `chunks`."""
    seeds = {weight: seed for seed, weight in enumerate(w for chunk in chunks for w in chunk.parameters())}
    weights = [*optimizer.model_fp32_groups, *optimizer.model_float16_groups]
    shards = [*optimizer.shard_fp32_groups, *optimizer.shard_float16_groups]
    return {
        shard: Place(seeds[weight], optimizer._get_model_param_range_map(weight)["param"].start)
        for weight_group, shard_group in zip(weights, shards, strict=True)
        for weight, shard in zip(weight_group, shard_group, strict=True)
    }


def _split(parameter: Tensor) -> bool:
    return parameter.dtype is torch.bfloat16
