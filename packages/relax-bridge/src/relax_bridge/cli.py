"""The command `relax-bridge`: `audit DIR`, `diff A B`, `map DIR|FILE|MODEL`.

Exit status: 0 whole or equal, 1 something is missing, extra or different, 2 it could not be told.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_bridge.audit import Audit, HfTensor, audit
from relax_bridge.checkpoint import CONFIG, Checkpoint, read_json
from relax_bridge.diff import diff
from relax_bridge.errors import BridgeError
from relax_bridge.models import model_map
from relax_bridge.models.published import PUBLISHED
from relax_bridge.rendering import aligned, layers_text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BridgeError as error:
        print(f"relax-bridge: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`| head`) left; keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relax-bridge", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("audit", help="account for every tensor of a checkpoint directory")
    one.add_argument("directory", type=Path)
    one.add_argument("--no-digest", action="store_true", help="do not read the tensors themselves")
    one.set_defaults(run=_audit)
    two = commands.add_parser("diff", help="name the tensors in which two checkpoints differ")
    two.add_argument("a", type=Path)
    two.add_argument("b", type=Path)
    two.set_defaults(run=_diff)
    three = commands.add_parser("map", help="print the weight table of a model")
    three.add_argument("model", help=f"a directory, a config.json, or one of: {', '.join(PUBLISHED)}")
    three.set_defaults(run=_map)
    for command in (one, two, three):
        command.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _audit(args: argparse.Namespace) -> int:
    found = audit(Checkpoint.open(args.directory), digests=not args.no_digest)
    print(json.dumps(found.as_dict(), indent=1) if args.json else _audit_text(found))
    return 0 if found.whole else 1


def _audit_text(found: Audit) -> str:
    rows: list[Sequence[str]] = [("megatron", "shape", "dtype", "transform", "partition")]
    for tensor in found.tensors:
        rows.append(
            (tensor.megatron, _shape(tensor.shape), tensor.dtype or "-", tensor.transform, tensor.partition)
        )
        rows += [_hf_row(part) for part in tensor.hf]
    if found.passthrough:
        rows.append(("(not held by the trainer)", "", "", "", ""))
        rows += [_hf_row(part) for part in found.passthrough]
    totals = found.totals()
    say, have = found.mtp_layers
    lines = [
        *aligned(rows),
        "",
        f"{found.path}: {found.model}, {totals['hf_tensors']} Hugging Face tensors in "
        f"{totals['megatron_tensors']} Megatron tensors, {totals['parameters']:,} parameters, "
        f"{totals['passthrough_tensors']} passed through; MTP layers: {say} by config, {have} by name",
        "whole: every tensor is covered exactly once" if found.whole else found.problems.text(),
    ]
    return "\n".join(lines)


def _hf_row(part: HfTensor) -> tuple[str, str, str, str, str]:
    return ("  < " + part.name, _shape(part.shape), part.dtype, part.digest or "", "")


def _diff(args: argparse.Namespace) -> int:
    found = list(diff(Checkpoint.open(args.a), Checkpoint.open(args.b)))
    if args.json:
        print(json.dumps({"equal": not found, "differences": [one.as_dict() for one in found]}, indent=1))
    else:
        for line in aligned([(one.name, one.kind, one.detail) for one in found]):
            print(line)
        print(f"tensors that differ: {len(found)}" if found else "equal, bit for bit")
    return 1 if found else 0


def _map(args: argparse.Namespace) -> int:
    config, names = _config_of(args.model)
    table = model_map(config, names=names)
    if args.json:
        rows = [
            {
                "megatron": row.megatron,
                "hf": list(row.hf),
                "hf_shapes": [list(shape) for shape in row.hf_shapes],
                "transform": row.transform.name,
                "partition": row.partition.describe(),
                "at": {key: list(values) for key, values in row.at.items()},
                "stacked": row.stacked,
            }
            for row in table.rows
        ]
        print(json.dumps({"model": table.model, "mtp_layers": table.mtp_layers, "rows": rows}, indent=1))
        return 0
    lines: list[Sequence[str]] = [("megatron / hugging face", "shape", "transform", "partition", "layers")]
    for row in table.rows:
        shape = next(row.entries()).megatron_shape
        at = layers_text(row.at)
        lines.append((row.megatron, _shape(shape), row.transform.name, row.partition.describe(), at))
        lines += [
            ("  < " + name, _shape(size), "", "", "")
            for name, size in zip(row.hf, row.hf_shapes, strict=True)
        ]
    lines += [("(not held by the trainer)", "", "", "", "")] if table.passthrough else []
    lines += [("  < " + prefix + "*", "", "", "", "") for prefix in table.passthrough]
    print("\n".join(aligned(lines)))
    return 0


def _config_of(model: str) -> tuple[Mapping[str, Any], tuple[str, ...] | None]:
    if model in PUBLISHED:
        return PUBLISHED[model], None
    path = Path(model)
    if path.is_dir():
        weights = any(path.glob("*.safetensors"))
        return read_json(path / CONFIG), Checkpoint.open(path).names if weights else None
    if path.is_file():
        return read_json(path), None
    raise BridgeError(f"{model} is no directory, no file, and none of {', '.join(PUBLISHED)}")


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
