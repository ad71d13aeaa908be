"""The command `relax-bridge`: audit DIR, diff A B, map MODEL, convert hf-to-megatron|megatron-to-hf SOURCE
OUT.

Exit status: 0 whole or equal, 1 something is missing, extra or different, 2 it could not be told or done.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from relax_bridge.commands import audit, convert, diff, map
from relax_bridge.errors import BridgeError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) left; keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (BridgeError, OSError) as error:
        print(f"relax-bridge: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relax-bridge", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (audit, diff, map, convert):
        command.add(commands)
    return parser
