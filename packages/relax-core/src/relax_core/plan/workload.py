"""The samples that a plan reckons with: their lengths are assumed, as no data is read."""

from dataclasses import dataclass

from relax_core.config.root import RelaxConfig


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
            words = (f"samples of {sum(lengths) // count} tokens on average, {max(lengths)} at most",)
            return cls(lengths, parts, 0, 0, 0, 0.0, 0, scored, forwards, words + _unplanned(config))
        rollout = config.rollout
        longest = rollout.max_new_tokens
        prompt_tokens = min(prompt_tokens, config.data.max_tokens or prompt_tokens)
        sequences = rollout.prompts_per_step * rollout.samples_per_prompt
        answers = spread(longest, max(1, sequences // parts), fill)
        mean = sum(answers) / len(answers)
        algorithm = config.algorithm
        once = (
            parts > 1 or algorithm.algorithm.needs_teacher,
            algorithm.needs_reference,
            algorithm.algorithm.needs_critic,
            config.teacher.path is not None,
        )
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
                *_unplanned(config),
            ),
        )


def _unplanned(config: RelaxConfig) -> tuple[str, ...]:
    """What the figures leave out, in words."""
    found = []
    if config.lora.rank:
        found.append("adapters are planned as whole weights: gradients and optimizer will take far less")
    if config.teacher.path is not None:
        found.append(f"the memory of the teacher {config.teacher.path} is not planned")
    return tuple(found)


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
