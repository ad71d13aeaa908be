"""``relax-rollout score``."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from relax_rollout.rewards import RewardInput, RewardRunner, load_reward


def add_arguments(commands: Any) -> None:
    """Add the sub-command to ``argparse``'s sub-parsers."""
    command: argparse.ArgumentParser = commands.add_parser(
        "score",
        help="score completions with a reward",
        description="Score completions with a reward and print one JSON object per completion.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--reward", default="math", help="math, exact_match or module:function")
    command.add_argument("--completion", required=True, action="append", help="text; may come several times")
    command.add_argument("--answer", help="reference answer")
    command.add_argument("--prompt", default="", help="prompt, for rewards that read it")
    command.add_argument("--timeout", type=float, default=10.0, help="seconds allowed for one completion")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Score and print.

    Raises:
        ValueError: no such reward, or a time limit that is not above 0.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # a user's module:function is looked for in the current directory too
    with RewardRunner(load_reward(arguments.reward), arguments.timeout) as runner:
        items = [RewardInput(arguments.prompt, text, arguments.answer) for text in arguments.completion]
        for result in runner.score_now(items):
            sys.stdout.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
