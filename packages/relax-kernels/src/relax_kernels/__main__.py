"""`python -m relax_kernels`: the operators and who serves them here; `check`: the parity suite."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from relax_kernels import __version__
from relax_kernels.explanation import CALLS
from relax_kernels.registry import backends, environment_variable, unavailable_backends
from relax_kernels.testing import NotServed, Target, parity_cases, targets


def table() -> list[str]:
    """Return the lines that say which backends there are and which operators each of them has."""
    lines = [f"relax-kernels {__version__}, torch {torch.__version__}"]
    for backend in backends():
        where = "any device" if backend.device_types is None else ", ".join(sorted(backend.device_types))
        lines.append(f"  {backend.name}: {where}, priority {backend.priority}")
    lines += [f"  {name}: {reason}" for name, reason in unavailable_backends()]
    width = max(map(len, CALLS))
    for op in CALLS:
        having = ", ".join(backend.name for backend in backends() if op in backend.operators)
        chosen = os.environ.get(environment_variable(op))
        lines.append(f"{op:{width}}  {having}{f'  (environment: {chosen})' if chosen else ''}")
    return lines


def check(target: Target, only: str) -> tuple[int, list[str]]:
    """Run the parity cases whose name contains `only` on a target.

    Returns the exit status (1 if a case failed or none was served) and the lines that say what happened.
    """
    lines, passed, failed, unserved = [], 0, 0, 0
    for case in parity_cases():
        if only not in case.name:
            continue
        try:
            case.check(target)
            passed += 1
        except NotServed as reason:
            unserved += 1
            lines.append(f"not served  {case.name}: {reason}")
        except (AssertionError, RuntimeError) as problem:  # a difference, or an error from a kernel
            failed += 1
            lines.append(f"FAILED  {case.name}: {problem}")
    counts = f"{passed} passed, {failed} failed, {unserved} not served"
    return int(failed > 0 or passed == 0), [*lines, f"{target.backend} on {target.device}: {counts}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m relax_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    checking = commands.add_parser("check", help="compare backends with the references, values and gradients")
    checking.add_argument("--backend", help="one backend; default: every one on every device present")
    checking.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args(arguments)
    if given.command is None:
        sys.stdout.write("\n".join(table()) + "\n")
        return 0
    wanted = [target for target in targets() if given.backend in (None, target.backend)]
    if not wanted:
        parser.error(f"no backend {given.backend!r} with a device here; there are {targets()}")
    status = 0
    for target in wanted:
        failed, lines = check(target, given.only)
        status |= failed
        sys.stdout.write("\n".join(lines) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
