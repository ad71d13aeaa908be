"""`relax-bridge diff A B`: the tensors in which two checkpoints differ."""

import argparse
import json
from pathlib import Path
from typing import Any

from relax_bridge.checkpoint import Checkpoint
from relax_bridge.commands.options import add_json
from relax_bridge.diff import diff
from relax_bridge.progress import Progress
from relax_bridge.rendering import aligned


def add(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("diff", help="name the tensors in which two checkpoints differ")
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints every difference; 0 if there is none."""
    with Progress("diff") as report:
        found = list(diff(Checkpoint.open(args.a), Checkpoint.open(args.b), report=report))
    if args.json:
        print(json.dumps({"equal": not found, "differences": [one.as_dict() for one in found]}, indent=1))
    else:
        for line in aligned([(one.name, one.kind, one.detail) for one in found]):
            print(line)
        print(f"tensors that differ: {len(found)}" if found else "equal, bit for bit")
    return 1 if found else 0
