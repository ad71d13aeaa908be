"""The samples that a plan reckons with: their lengths are assumed, as no data is read."""

from dataclasses import dataclass

from relax_core.config.root import RelaxConfig

PICTURE_TOKENS = 256
"""Of a picture: 512 x 512 pixels, by the published models' processor."""


@dataclass(frozen=True)
class Workload:
    """One step.

    Attributes:
        lengths: tokens of the samples of one optimizer step.
        optimizer_steps: of one batch.
        prompts, sequences: sampled in one step; 0 without sampling.
        prompt_tokens, new_tokens: of a prompt, and of a completion on average.
        longest: tokens of the longest completion.
        scored: share of the tokens that carry loss.
        forwards: passes over the batch without gradients (old policy, reference).
        picture_tokens: of a sample's tokens, those that stand for its picture; 0 without pictures.
        words: the assumptions, for a person.
    """

    lengths: tuple[int, ...]
    optimizer_steps: int
    prompts: int
    sequences: int
    prompt_tokens: int
    new_tokens: float
    longest: int
    scored: float
    forwards: int
    words: tuple[str, ...]
    picture_tokens: int = 0

    @classmethod
    def of(cls, config: RelaxConfig, *, prompt_tokens: int = 512, fill: float = 0.5) -> "Workload":
        """The workload of a config.

        Args:
            config: the run's.
            prompt_tokens: of a prompt.
            fill: mean completion, or mean sample of fine-tuning, as a share of the longest; lengths are
                spread evenly around it.
        """
        parts = config.trainer.optimizer_steps_per_batch
        if config.algorithm.algorithm.loop != "rl":
            longest = config.data.longest[1] or config.trainer.micro_batch_tokens
            # Every block but the last is full, and every token of it is a target.
            blocks = config.data.text_key is not None
            fill, scored = (1.0, 1.0) if blocks else (fill, 0.5)
            pairs = config.algorithm.algorithm.loop == "pairs"
            count = max(1, config.sft.samples_per_step // parts) * (2 if pairs else 1)
            forwards = 1 + parts if pairs else 0
            lengths = spread(longest, count, fill)
            picture = _picture(config, sum(lengths) // count)
            words = (
                f"samples of {sum(lengths) // count} tokens on average, {max(lengths)} at most",
                *_of_pictures(picture),
            )
            return cls(lengths, parts, 0, 0, 0, 0.0, 0, scored, forwards, words, picture)
        rollout = config.rollout
        longest = rollout.max_new_tokens
        prompt_tokens = min(prompt_tokens, config.data.max_tokens or prompt_tokens)
        sequences = rollout.prompts_per_step * rollout.samples_per_prompt
        answers = spread(longest, max(1, sequences // parts), fill)
        mean = sum(answers) / len(answers)
        algorithm = config.algorithm
        once = (
            algorithm.needs_old_logprob(parts),
            algorithm.needs_reference,
            algorithm.algorithm.needs_critic,
            config.teacher.path is not None,
        )
        picture = _picture(config, prompt_tokens)
        forwards = sum(map(int, once)) + parts * int(algorithm.algorithm.needs_scores)
        return cls(
            lengths=tuple(prompt_tokens + answer for answer in answers),
            optimizer_steps=parts,
            prompts=rollout.prompts_per_step,
            sequences=sequences,
            prompt_tokens=prompt_tokens,
            new_tokens=mean,
            longest=longest,
            scored=mean / (mean + prompt_tokens),
            forwards=forwards,
            words=(
                f"prompts of {prompt_tokens} tokens, completions of {mean:.0f} on average, {longest} at most",
                *_of_pictures(picture),
            ),
            picture_tokens=picture,
        )


def _picture(config: RelaxConfig, tokens: int) -> int:
    """Tokens of the picture of a sample or prompt of `tokens` tokens: at most half of them."""
    return min(PICTURE_TOKENS, max(1, tokens // 2)) if config.model.vision != "absent" else 0


def _of_pictures(tokens: int) -> tuple[str, ...]:
    return (f"one picture of {tokens} tokens in each of them",) if tokens else ()


def spread(longest: int, count: int, fill: float) -> tuple[int, ...]:
    """`count` lengths up to `longest`, evenly spread, of mean `fill` * `longest`; the longest is there.

    >>> spread(10, 3, 0.5)
    (1, 5, 10)
    """
    if count == 1:
        return (longest,)
    low = max(1.0, (2 * fill - 1) * longest)
    step = (longest - low) / (count - 1)
    return tuple(int(low + step * index) for index in range(count))
