"""Relax's side of `step.py`: the command `relax-train` with its arguments, halted before each step."""

import sys
from collections.abc import Sequence
from typing import Any

from gate import Example, Gate
from relax_core.cli.train import main


def score(loop: Any, examples: Sequence[Example]) -> list[list[float]]:
    """Log-probs of every completion token, by the trainer's own forward pass."""
    import torch
    from relax_core.trainer.sample import Sample

    samples = [
        Sample(torch.tensor(prompt + completion), torch.tensor([0.0] * len(prompt) + [1.0] * len(completion)))
        for prompt, completion in examples
    ]
    scores = loop._session.policy.score(samples)
    return [row[len(prompt) :].tolist() for row, (prompt, _) in zip(scores, examples, strict=True)]


def halt_before_steps(gate: Gate) -> None:
    """Has every step of reinforcement learning wait at the gate."""
    from relax_core.loop.rl import RlLoop

    take_step = RlLoop.step

    def step(loop: RlLoop, number: int) -> Any:
        gate.wait(lambda examples: score(loop, examples))
        result = take_step(loop, number)
        gate.done(int(result.metrics["train_tokens"]), result.metrics["reward"])
        return result

    RlLoop.step = step


if __name__ == "__main__":
    halt_before_steps(Gate())
    sys.exit(main())
