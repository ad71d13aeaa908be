"""Refuses data that the model cannot take, before the first step instead of in the middle of a run."""

from collections.abc import Sequence

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
    strange = [example for example in examples if example.ids.max() >= vocab_size]
    if strange:
        raise DataError(
            f"{len(strange)} of {len(examples)} examples hold token ids beyond the model's vocabulary of "
            f"{vocab_size}: the tokenizer is of another model, or vocab_size in config.json is wrong.\n"
            + _listing(strange, [f"token id {example.ids.max()}" for example in strange])
        )
    if context is None:
        return
    long = [example for example in examples if len(example.ids) + new_tokens > context]
    if long:
        room = context - new_tokens
        cure = (
            f"set data.max_tokens to at most {room}, and data.overlong to skip or truncate"
            if room > 0
            else "lower rollout.max_new_tokens"
        )
        raise DataError(
            f"{len(long)} of {len(examples)} prompts, with {new_tokens} new tokens behind them, exceed the "
            f"model's context of {context} tokens (max_position_embeddings): {cure}.\n"
            + _listing(long, [f"{len(example.ids)} tokens" for example in long])
        )


def _listing(examples: Sequence[Example], reasons: Sequence[str]) -> str:
    lines = [f"  {example.id}: {why}" for example, why in zip(examples[:_SHOWN], reasons, strict=False)]
    return "\n".join(
        [*lines, *([f"  ... and {len(examples) - _SHOWN} more"] if len(examples) > _SHOWN else [])]
    )
