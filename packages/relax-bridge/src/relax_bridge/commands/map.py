"""`relax-bridge map MODEL`: the weight table of a model."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from relax_bridge.commands.options import add_json, config_of
from relax_bridge.model_map import ModelMap
from relax_bridge.models import model_map
from relax_bridge.models.published import KNOWN
from relax_bridge.rendering import aligned, layers_text, shape_text


def add(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("map", help="print the weight table of a model")
    parser.add_argument("model", help=f"a directory, a config.json, or one of: {', '.join(KNOWN)}")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    config, names = config_of(args.model)
    table = model_map(config, names=names)
    print(json.dumps(_as_dict(table), indent=1) if args.json else _text(table))
    return 0


def _as_dict(table: ModelMap) -> dict[str, Any]:
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
    return {"model": table.model, "mtp_layers": table.mtp_layers, "rows": rows}


def _text(table: ModelMap) -> str:
    lines: list[Sequence[str]] = [("megatron / hugging face", "shape", "transform", "partition", "layers")]
    for row in table.rows:
        about = (row.transform.name, row.partition.describe(), layers_text(row.at))
        lines.append((row.megatron, shape_text(row.megatron_shape), *about))
        lines += [
            ("  < " + name, shape_text(size), "", "", "")
            for name, size in zip(row.hf, row.hf_shapes, strict=True)
        ]
    lines += [("(not held by the trainer)", "", "", "", "")] if table.passthrough else []
    lines += [("  < " + prefix + "*", "", "", "", "") for prefix in table.passthrough]
    return "\n".join(aligned(lines))
