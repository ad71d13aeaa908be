"""``relax-rollout``: sample from a model, or score answers, from the command line."""

import argparse
import logging
import sys
from collections.abc import Sequence

from relax_rollout import __version__
from relax_rollout.cli import generate, score


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    top = argparse.ArgumentParser(
        prog="relax-rollout", description="Sample from a model, or score completions."
    )
    top.add_argument("--version", action="version", version=f"relax-rollout {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    for module in (generate, score):
        module.add_arguments(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if it did its work, 2 if that is impossible (the reason goes to stderr)."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    arguments = parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except ValueError as error:
        sys.stderr.write(f"relax-rollout {arguments.command}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
