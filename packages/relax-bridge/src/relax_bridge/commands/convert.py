"""`relax-bridge convert hf-to-megatron|megatron-to-hf SOURCE OUT`."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from relax_bridge.commands.options import add_json, add_mtp
from relax_bridge.convert import hf_to_megatron, megatron_to_hf
from relax_bridge.errors import BridgeError
from relax_bridge.progress import Progress

# Each direction with the options that only it has.
_DIRECTIONS = {"hf-to-megatron": ("mtp_init", "mtp_std", "seed"), "megatron-to-hf": ("like", "max_shard_gb")}


def add(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "convert", help="convert between Hugging Face and Megatron dist_checkpointing directories"
    )
    parser.add_argument(
        "direction",
        type=_direction,
        help=f"{' or '.join(_DIRECTIONS)} (also, in quotes, 'hf->megatron' and 'megatron->hf')",
    )
    parser.add_argument("source", type=Path)
    parser.add_argument(
        "out", type=Path, help="the directory to make; an earlier checkpoint there is replaced"
    )
    parser.add_argument(
        "--like", type=Path, metavar="DIR", help="megatron-to-hf: the Hugging Face directory it started from"
    )
    parser.add_argument(
        "--max-shard-gb",
        type=_gigabytes,
        metavar="GB",
        help="megatron-to-hf: size of a weight file (default: as --like)",
    )
    add_mtp(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Converts; what fails leaves an earlier directory whole."""
    _refuse_unused(args)
    with Progress(args.direction) as report:
        if args.direction == "hf-to-megatron":
            hf_to_megatron(
                args.source,
                args.out,
                mtp_layers=args.mtp_layers,
                mtp_init=args.mtp_init,
                mtp_std=args.mtp_std,
                seed=args.seed or 0,
                report=report,
            )
        else:
            if args.like is None:
                raise BridgeError(
                    "megatron-to-hf needs --like DIR, the Hugging Face directory that training started from: "
                    "config, tokenizer and dtypes come from there"
                )
            megatron_to_hf(
                args.source,
                args.out,
                like=args.like,
                mtp_layers=args.mtp_layers,
                max_shard_bytes=args.max_shard_gb,
                report=report,
            )
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    done = {"direction": args.direction, "source": str(args.source), "out": str(args.out), "bytes": size}
    print(json.dumps(done) if args.json else f"{args.out}: {size:,} bytes")
    return 0


def _refuse_unused(args: argparse.Namespace) -> None:
    for direction, options in _DIRECTIONS.items():
        given = [f"--{name.replace('_', '-')}" for name in options if getattr(args, name) is not None]
        if given and direction != args.direction:
            raise BridgeError(f"{args.direction} has no use for {', '.join(given)}, which {direction} has")
        drawn = [option for option in given if option in {"--mtp-std", "--seed"}]
        if drawn and args.mtp_init != "random":
            raise BridgeError(f"{', '.join(drawn)} is for --mtp-init random")


def _gigabytes(text: str) -> int:
    """Gigabytes as bytes."""
    try:
        size = float(text) * 1e9
    except ValueError:
        size = math.nan
    if not 1 <= size < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give gigabytes, for instance 5 or 0.5")
    return int(size)


def _direction(text: str) -> str:
    word = text.replace("->", "-to-")
    if word not in _DIRECTIONS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(_DIRECTIONS)} (a shell takes an unquoted > for a redirection)"
        )
    return word
