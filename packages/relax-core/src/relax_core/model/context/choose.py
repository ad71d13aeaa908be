"""How context-parallel ranks share the work of a token mixer: chosen by pure functions, with the reason."""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from relax_core.device import ParallelConfig
from relax_core.model.config import Qwen35Config

logger = logging.getLogger(__name__)

AttentionWay = Literal["gather", "heads"]
DeltaWay = Literal["heads", "state"]


@dataclass(frozen=True)
class AttentionChoice:
    """`way`: "gather" gives every rank all keys and values, "heads" gives it all tokens of its heads."""

    way: AttentionWay
    reason: str


@dataclass(frozen=True)
class DeltaChoice:
    """`way`: "heads" gives every rank all tokens of its heads, "state" hands states from piece to piece."""

    way: DeltaWay
    reason: str


@dataclass(frozen=True)
class ContextChoice:
    """What full attention and the gated delta net do."""

    attention: AttentionChoice
    delta: DeltaChoice


def choose_attention(
    wanted: Literal["auto", "gather", "heads"], *, heads: int, tensor: int, context: int
) -> AttentionChoice:
    """What full attention does with its share of the row.

    `auto` takes "heads" where it can. "gather" moves fewer values with few key/value heads, which is little
    beside the attention of a long row; but its two calls see stretches of keys of different lengths, for
    which kernels are slower, and samples that end anywhere make some ranks wait for others
    (`benchmarks/trainer/layouts.py`).

    Args:
        wanted: the setting.
        heads: query heads of the whole model.
        tensor: tensor-parallel ranks.
        context: context-parallel ranks.

    Raises:
        ValueError: "heads" was asked for, and the query heads do not divide by `tensor` x `context`.
    """
    if context == 1:
        return AttentionChoice("gather", "one rank holds the whole row")
    fits = heads % (tensor * context) == 0
    limit = (
        f"{heads} query heads do not divide by tensor {tensor} x context {context} = {tensor * context}, as "
        "attention over heads needs"
    )
    if wanted == "heads" and not fits:
        raise ValueError(
            f"{limit}; choose sizes whose product divides {heads}, or context_attention gather or auto"
        )
    if wanted != "auto":
        return AttentionChoice(wanted, "asked for by context_attention")
    if not fits:
        return AttentionChoice("gather", limit)
    return AttentionChoice(
        "heads",
        f"{heads} query heads divide by {tensor * context}: each rank attends over the whole row in one "
        "call, and all ranks to equally much",
    )


def choose_delta(
    wanted: Literal["auto", "heads", "state"], *, key_heads: int, value_heads: int, tensor: int, context: int
) -> DeltaChoice:
    """What the gated delta net does with its share of the row.

    `auto` takes "heads" where it can: it scans every token once, while "state" scans those twice whose
    sample began on an earlier rank.

    Args:
        wanted: the setting.
        key_heads: key heads of the whole model.
        value_heads: value heads of the whole model.
        tensor: tensor-parallel ranks.
        context: context-parallel ranks.

    Raises:
        ValueError: "heads" was asked for, and the key or value heads do not divide by `tensor` x `context`.
    """
    if context == 1:
        return DeltaChoice("heads", "one rank holds the whole row")
    shares = tensor * context
    short = [
        f"{count} {kind} heads"
        for count, kind in ((key_heads, "key"), (value_heads, "value"))
        if count % shares
    ]
    limit = (
        f"{' and '.join(short)} do not divide by tensor {tensor} x context {context} = {shares}, as the "
        "delta net over heads needs"
    )
    if wanted == "heads" and short:
        raise ValueError(f"{limit}; choose smaller sizes, or context_delta state or auto")
    if wanted != "auto":
        return DeltaChoice(wanted, "asked for by context_delta")
    if short:
        return DeltaChoice("state", limit)
    return DeltaChoice(
        "heads",
        f"{key_heads} key and {value_heads} value heads divide by {shares}, and each token is scanned once",
    )


def choose_context(config: Any, model: Qwen35Config, parallel: ParallelConfig) -> ContextChoice:
    """Chooses for a whole model, says so once in the log, and notes it in Megatron's `config` for the layers.

    Raises:
        ValueError: see `choose_attention` and `choose_delta`.
    """
    sizes = {"tensor": parallel.tensor, "context": parallel.context}
    choice = ContextChoice(
        choose_attention(parallel.context_attention, heads=model.attention_heads, **sizes),
        choose_delta(
            parallel.context_delta,
            key_heads=model.delta_key_heads,
            value_heads=model.delta_value_heads,
            **sizes,
        ),
    )
    if parallel.context > 1:
        _log(choice)
    config.context_choice = choice
    return choice


def context_choice(config: Any) -> ContextChoice:
    """What `choose_context` noted in Megatron's config."""
    return cast(ContextChoice, config.context_choice)


@cache
def _log(choice: ContextChoice) -> None:
    for mixer, chosen in (("full attention", choice.attention), ("the delta net", choice.delta)):
        logger.info("context parallelism of %s: %s (%s)", mixer, chosen.way, chosen.reason)
