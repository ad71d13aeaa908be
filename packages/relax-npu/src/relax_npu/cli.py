"""The command `relax-npu`."""

import argparse
from collections.abc import Sequence
from importlib.metadata import version

from relax_npu.doctor import Machine, examine
from relax_npu.probe import probe


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    chosen = _parser().parse_args(arguments)
    report = examine(Machine(probe=lambda: probe(timeout_s=chosen.timeout)))
    print(report.as_json() if chosen.json else report.as_text())
    return report.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relax-npu", description="The Ascend NPU backend of Relax.")
    parser.add_argument("--version", action="version", version=f"relax-npu {version('relax-npu')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="examine this machine: driver, CANN, torch_npu, environment",
        description="Examines this machine and says for each finding what to do. "
        "Exit code: 0 when nothing stands in the way of the npu device, 1 otherwise.",
    )
    doctor.add_argument("--json", action="store_true", help="print the report as one JSON object")
    doctor.add_argument(
        "--timeout",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="how long torch_npu may take to start (default: 120)",
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
