"""What a weight update takes beside the weights of trainer and engine.

An update is a transaction: until all of it has arrived the old version serves, so that somebody holds the new
one too. On devices that both share, engines open the trainer's own memory, and what does not lie there as the
checkpoint has it is packed beside it (`relax_rollout.weights.ipc`, whose buffers stay for the next update);
elsewhere an engine stages a copy.
"""

from dataclasses import dataclass
from typing import Literal

from relax_core.config.root import RelaxConfig
from relax_core.device.parallel import ParallelConfig
from relax_core.model.config import Qwen35Config
from relax_core.plan.local import Local
from relax_core.plan.parameters import DRAFTS, TOWER, stage_parameters

BUCKET = 512 * 2**20
"""Bytes of tensors that travel together (`relax_core.loop.weights`); a larger tensor goes alone."""
_HALF = 2


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes of one device.

    Attributes:
        packed: what a trainer rank keeps for its engine from the first update on.
        passing: whole tensors of a bucket on a trainer rank, and the shares that one is joined from.
        staged: the new version on a device of an engine, until it serves.
    """

    packed: int = 0
    passing: int = 0
    staged: int = 0


def update_memory(config: RelaxConfig, model: Qwen35Config) -> UpdateMemory:
    """The memory of an update of `model`, as the trainer has it."""
    parallel = config.parallel
    whole = Local.of(model, ParallelConfig(), tokens=1, activation=_HALF)
    parts = stage_parameters(whole, model.layer_types, first=True, last=True)
    if config.model.vision != "trained":
        parts.pop(TOWER, None)
    total = _HALF * sum(count.total for count in parts.values())
    largest = _HALF * max(
        model.vocab_size * model.hidden_size, 2 * model.experts * model.hidden_size * model.ffn_size
    )
    way = way_of_weights(config)
    # The embedded engine stages a copy whatever the way; what lies on the host goes over tensor by tensor.
    staged = total if config.rollout.engine != "sglang" or way == "broadcast" else 0
    staged = staged or (largest if way == "host" else 0)
    spread = parallel.tensor * parallel.pipeline * parallel.expert > 1
    passing = max(BUCKET, largest) + (largest if spread else 0)
    if way != "device":
        return UpdateMemory(0, passing, staged)
    local = Local.of(model, parallel, tokens=1, activation=_HALF)
    if _shares_fit(config, model):
        # The input projection of a draft layer is whole on every rank of an engine.
        packed = _apart(local, shares=True) + (2 * model.hidden_size**2 * _HALF if model.mtp_layers else 0)
    else:
        packed = total if spread else _apart(local)
        if config.lora.rank and not spread:
            # What is no projection has no adapters.
            rest = ("embedding", "norms", "head", *(() if config.lora.drafts else (DRAFTS,)))
            packed = max(packed, _HALF * sum(n.total for part, n in parts.items() if part not in rest))
    return UpdateMemory(packed, min(passing, packed), staged)


def way_of_weights(config: RelaxConfig) -> Literal["process", "device", "host", "broadcast"]:
    """Through what the weights of a version come to the engines, so far as settings tell; for `auto` the one
    that takes most memory."""
    rollout, cluster = config.rollout, config.cluster
    if cluster.mode != "ray" and rollout.engine != "sglang":
        return "process"
    if rollout.update_path in ("host", "disk"):
        return "host"
    if rollout.update_path == "broadcast":
        return "broadcast"
    if cluster.mode != "ray":
        return "device" if config.sglang.tensor == 1 and config.run.device != "cpu" else "host"
    if cluster.placement == "colocate" and config.run.device != "cpu":
        return "device"
    return "host" if cluster.address is None else "broadcast"


def _shares_fit(config: RelaxConfig, model: Qwen35Config) -> bool:
    """Whether a server's ranks take the shares of the trainer's (`relax_core.cluster.weight_path`)."""
    parallel, tensor = config.parallel, config.sglang.tensor
    return (
        config.cluster.mode == "ray"
        and config.rollout.engine == "sglang"
        and 1 < tensor == parallel.tensor <= model.kv_heads
        and parallel.pipeline == 1
        and not config.lora.rank
        and not (model.experts and (parallel.expert > 1 or parallel.expert_tensor not in (None, tensor)))
    )


def _apart(local: Local, *, shares: bool = False) -> int:
    """Bytes of the tensors that a rank holds otherwise than a checkpoint: queries with their gates, several
    keys and values of full attention, which lie together by groups, and experts, which a checkpoint stacks;
    of a share also what a delta net convolves, which is three pieces there."""
    model, hidden = local.model, local.model.hidden_size
    layers = model.layer_types.count("full_attention") + model.mtp_layers
    heads = 2 * local.heads + 2 * local.kv_heads * (local.kv_heads > 1)
    numbers = layers * heads * model.head_dim * hidden
    if model.experts:
        # Those of draft layers have names of their own.
        one = 3 * hidden * model.ffn_size // local.expert_ranks
        numbers += model.num_layers * local.local_experts * one
    if shares:
        keys, values = local.delta_heads
        channels = 2 * keys * model.delta_key_dim + values * model.delta_value_dim
        deltas = model.layer_types.count("linear_attention")
        numbers += deltas * channels * (hidden + model.conv_width)
    return _HALF * numbers
