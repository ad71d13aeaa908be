"""Options that several subcommands share."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from relax_bridge.checkpoint import CONFIG, Checkpoint, read_json
from relax_bridge.errors import BridgeError
from relax_bridge.layout import Layout
from relax_bridge.models.published import KNOWN
from relax_bridge.mtp import MtpInit


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """The sizes of a `Layout`."""
    group = parser.add_argument_group("layout", "whose ranks own what; by default one rank owns everything")
    for name, what in (
        ("tensor", "tensor-parallel ranks"),
        ("pipeline", "pipeline stages"),
        ("pipeline-chunks", "chunks of layers per stage"),
        ("expert", "expert-parallel ranks"),
        ("vocab-multiple", "the vocabulary is padded to a multiple of this times --tensor"),
    ):
        group.add_argument(f"--{name}", type=int, default=1, metavar="N", help=what)
    group.add_argument("--expert-tensor", type=int, metavar="N", help="ranks per expert (default: --tensor)")


def layout_of(args: argparse.Namespace) -> Layout:
    """The layout that the options say."""
    return Layout(
        tensor=args.tensor,
        pipeline=args.pipeline,
        pipeline_chunks=args.pipeline_chunks,
        expert=args.expert,
        expert_tensor=args.expert_tensor,
        vocab_multiple=args.vocab_multiple,
    )


def add_mtp(parser: argparse.ArgumentParser) -> None:
    """How to bridge two numbers of MTP layers."""
    group = parser.add_argument_group("multi-token prediction")
    group.add_argument(
        "--mtp-layers", type=int, metavar="N", help="MTP layers of the model (default: config)"
    )
    group.add_argument(
        "--mtp-init", choices=get_args(MtpInit), help="what to do if the checkpoint has others"
    )
    group.add_argument("--mtp-std", type=float, metavar="STD", help="of --mtp-init random")
    group.add_argument("--seed", type=int, metavar="N", help="of --mtp-init random (default: 0)")


def config_of(model: str) -> tuple[Mapping[str, Any], tuple[str, ...] | None]:
    """The config, and the names if there are any, of a directory, a config.json or a published model.

    Raises:
        BridgeError: it is none of them.
    """
    if model in KNOWN:
        return KNOWN[model], None
    path = Path(model)
    if path.is_dir():
        weights = any(path.glob("*.safetensors"))
        return read_json(path / CONFIG), Checkpoint.open(path).names if weights else None
    if path.is_file():
        return read_json(path), None
    raise BridgeError(f"{model} is no directory, no file, and none of {', '.join(KNOWN)}")
