"""Refuses data that the model cannot take, before the first step instead of in the middle of a run."""

from collections.abc import Callable, Sequence

from relax_core.data.examples import Example
from relax_core.data.problems import DataError

_SHOWN = 5


def refuse_unfit(
    examples: Sequence[Example], *, vocab_size: int, context: int | None = None, new_tokens: int = 0
) -> None:
    """Checks the token ids of examples, and their lengths.

    Args:
        examples: prompts or samples.
        vocab_size: ids from here on are none of the model's.
        context: tokens that the model can look back on, `new_tokens` sampled ones included; None is no limit.
        new_tokens: sampled behind each example at most.

    Raises:
        DataError: with the places of the first examples that do not fit, and what to do.
    """
    _refuse(
        examples,
        lambda example: example.ids.max() >= vocab_size,
        lambda example: f"token id {example.ids.max()}",
        f"examples hold token ids beyond the model's vocabulary of {vocab_size}: the tokenizer is of another "
        "model, or vocab_size in config.json is wrong",
    )
    if context is None:
        return
    room = context - new_tokens
    cure = (
        f"set data.max_tokens to at most {room}, and data.overlong to skip or truncate"
        if room > 0
        else "lower rollout.max_new_tokens"
    )
    _refuse(
        examples,
        lambda example: len(example.ids) > room,
        lambda example: f"{len(example.ids)} tokens",
        f"prompts, with {new_tokens} new tokens behind them, exceed the model's context of {context} tokens "
        f"(max_position_embeddings): {cure}",
    )


def _refuse(
    examples: Sequence[Example],
    unfit: Callable[[Example], bool],
    why: Callable[[Example], str],
    fault: str,
) -> None:
    count, lines = 0, []
    for example in examples:
        if unfit(example):
            count += 1
            if count <= _SHOWN:
                lines.append(f"  {example.id}: {why(example)}")
    if count > _SHOWN:
        lines.append(f"  ... and {count - _SHOWN} more")
    if count:
        raise DataError("\n".join([f"{count} of {len(examples)} {fault}.", *lines]))
