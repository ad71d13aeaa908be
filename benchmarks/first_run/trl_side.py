"""TRL's side of `step.py`, in TRL's own environment: its GRPO trainer, halted before each step.

    python trl_side.py MODEL_DIRECTORY TRAIN_JSONL OUTPUT_DIRECTORY THREADS

Settings are those of the Relax side, and where TRL has a choice, the faster one: no gradient checkpointing,
the whole batch in one pass, no logging inside of the step.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import load_dataset
from gate import Example, Gate
from sizes import MAX_NEW_TOKENS, PROMPTS, SAMPLES
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GATE = Gate()


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion is the answer's number and nothing else."""
    return [
        float(text.strip().isdecimal() and int(text) == int(right))
        for text, right in zip(completions, answer, strict=True)
    ]


class Halt(TrainerCallback):
    """Waits at the gate before each step, and reports after it."""

    def __init__(self) -> None:
        self.trainer: GRPOTrainer | None = None
        self._seen = 0
        self._optimizer_began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        GATE.wait(lambda examples: score(self.trainer, examples))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._optimizer_began = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        GATE.book("train_optimizer", time.perf_counter() - self._optimizer_began)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        tokens, self._seen = int(state.num_input_tokens_seen) - self._seen, int(state.num_input_tokens_seen)
        GATE.done(tokens, self.trainer.mean_reward)


class PhasedTrainer(GRPOTrainer):
    """Books the time of its parts."""

    def _generate(self, *args: Any, **options: Any) -> Any:
        with GATE.phase("rollout"):
            return super()._generate(*args, **options)

    def _calculate_rewards(self, *args: Any, **options: Any) -> Any:
        with GATE.phase("reward"):
            rewards = super()._calculate_rewards(*args, **options)
            self.mean_reward = float(rewards.mean())
            return rewards

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        with GATE.phase("train_forward"):
            return super().compute_loss(*args, **options)


@torch.no_grad()
def score(trainer: Any, examples: Sequence[Example]) -> list[list[float]]:
    """Log-probs of every completion token, by TRL's own forward pass on a batch padded as it pads."""
    pad = trainer.processing_class.pad_token_id
    left, right = (max(len(example[side]) for example in examples) for side in (0, 1))
    ids, mask = [], []
    for prompt, completion in examples:
        before, after = left - len(prompt), right - len(completion)
        ids.append([pad] * before + prompt + completion + [pad] * after)
        mask.append([0] * before + [1] * (len(prompt) + len(completion)) + [0] * after)
    scores, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model, torch.tensor(ids), torch.tensor(mask), right
    )
    return [row[: len(completion)].tolist() for row, (_, completion) in zip(scores, examples, strict=True)]


def main(model: str, data: str, output: str, threads: int) -> None:
    torch.set_num_threads(threads)
    halt = Halt()
    trainer = PhasedTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        train_dataset=load_dataset("json", data_files=data, split="train", cache_dir=f"{output}/datasets"),
        callbacks=[halt],
        args=GRPOConfig(
            output_dir=output,
            model_init_kwargs={"dtype": "float32"},
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=MAX_NEW_TOKENS,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_steps=10_000,
            logging_steps=10_000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    halt.trainer = trainer
    backward = trainer.accelerator.backward

    def booked_backward(*arguments: Any, **options: Any) -> None:
        with GATE.phase("train_backward"):
            backward(*arguments, **options)

    trainer.accelerator.backward = booked_backward
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:4], threads=int(sys.argv[4]))
