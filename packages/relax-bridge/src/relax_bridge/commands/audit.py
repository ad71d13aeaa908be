"""`relax-bridge audit DIR`: accounts for every tensor of a checkpoint."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_bridge.audit import Audit, HfTensor, audit
from relax_bridge.checkpoint import Checkpoint
from relax_bridge.commands.options import add_json, add_layout, layout_of
from relax_bridge.progress import Progress
from relax_bridge.rendering import aligned, ranges_text, shape_text


def add(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("audit", help="account for every tensor of a checkpoint directory")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--no-digest", action="store_true", help="do not read the tensors themselves")
    add_layout(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the account; 0 if it is whole."""
    with Progress("audit") as report:
        checkpoint = Checkpoint.open(args.directory)
        found = audit(checkpoint, digests=not args.no_digest, layout=layout_of(args), report=report)
    print(json.dumps(found.as_dict(), indent=1) if args.json else _text(found))
    return 0 if found.whole else 1


def _text(found: Audit) -> str:
    rows: list[Sequence[str]] = [("megatron", "shape", "dtype", "transform", "partition", "owner")]
    for tensor in found.tensors:
        owners = sorted({owner.rank for owner in tensor.owners})
        rows.append(
            (
                tensor.megatron,
                shape_text(tensor.shape),
                tensor.dtype or "-",
                tensor.transform,
                tensor.partition,
                ranges_text(owners),
            )
        )
        rows += [_hf_row(part) for part in tensor.hf]
    if found.passthrough:
        rows.append(("(not held by the trainer)", "", "", "", "", ""))
        rows += [_hf_row(part) for part in found.passthrough]
    totals = found.totals()
    say, have = found.mtp_layers
    lines = [
        *aligned(rows),
        "",
        f"{found.path}: {found.model}, {totals['hf_tensors']} Hugging Face tensors in "
        f"{totals['megatron_tensors']} Megatron tensors, {totals['parameters']:,} parameters, "
        f"{totals['bytes']:,} bytes, {totals['passthrough_tensors']} passed through; "
        f"MTP layers: {say} by config, {have} by name",
        "whole: every tensor is covered exactly once" if found.whole else found.problems.text(),
    ]
    return "\n".join(lines)


def _hf_row(part: HfTensor) -> tuple[str, str, str, str, str, str]:
    return ("  < " + part.name, shape_text(part.shape), part.dtype, part.digest or "", "", "")
