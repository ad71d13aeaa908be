"""The command `relax-npu`."""

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from relax_npu import child, commands, engine, hccl, support
from relax_npu.allocator import VARIABLE as ALLOCATOR
from relax_npu.commands import Step
from relax_npu.doctor import Machine, examine
from relax_npu.doctor.mindspeed import wanted_switches
from relax_npu.operators.table import needed_operators
from relax_npu.probe import probe
from relax_npu.recipe import RecipeError, shares_dies
from relax_npu.visible import VARIABLE, VisibleDevicesError, format_visible, parse_visible

_LONGEST_S = 86400


def main(arguments: Sequence[str] | None = None, machine: Machine | None = None) -> int:
    """Runs the command and returns its exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        code: int = chosen.run(chosen, machine)
    except KeyboardInterrupt:
        return child.INTERRUPTED
    return code


def _doctor(chosen: argparse.Namespace, machine: Machine | None) -> int:
    report = examine(
        machine
        or Machine(
            probe=lambda: probe(
                timeout_s=chosen.timeout, operators=needed_operators(), mindspeed=wanted_switches()
            )
        )
    )
    _tell(report.as_json() if chosen.json else report.as_text())
    return report.exit_code


def _env(chosen: argparse.Namespace, machine: Machine | None) -> int:
    try:
        shared = chosen.colocate if chosen.recipe is None else shares_dies(chosen.recipe)
    except RecipeError as error:
        sys.stderr.write(f"relax-npu env: {error}\n")
        return 2
    for name, value in environment(chosen.dies, shared).items():
        _tell(f"export {name}={value}")
    return 0


def environment(dies: Sequence[int], colocate: bool) -> dict[str, str]:
    """The environment of a run on some dies; `colocate`: trainer and engine share them."""
    shape = engine.EngineShape(devices=len(dies), colocated=colocate)
    return {
        VARIABLE: format_visible(dies),
        # Ray would write ids in the order in which it handed them out; ours are set by the launcher.
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
        ALLOCATOR: f"expandable_segments:{not colocate}",
        **hccl.hccl_environment(processes_per_die=2 if colocate else 1),
        **{name: value for name, value in engine.engine_environment(shape).items() if name != ALLOCATOR},
    }


def _schema(chosen: argparse.Namespace, machine: Machine | None) -> int:
    _tell(support.schema_report())
    return 0


def _image(chosen: argparse.Namespace, machine: Machine | None) -> int:
    looked_at = machine or Machine()
    if chosen.action == "build":
        lacking = commands.outside(Path.cwd()) + commands.without_docker(looked_at)
        if _refused(lacking, "the image cannot be built here", chosen.dry_run):
            return 1
        step = commands.build(chosen.image, pip_config=chosen.pip_config)
        return _carry_out((step,), chosen.dry_run)
    dies = chosen.dies or commands.visible_dies(looked_at)
    lacking = commands.missing(looked_at, chosen.dies or ())
    if _refused(lacking, "this machine cannot run on an NPU", chosen.dry_run):
        return 1
    dies = dies or [0]
    steps = commands.check(dies, chosen.image, looked_at)
    if chosen.action == "run":
        # `--` before the command is a habit of many.
        command = chosen.command[chosen.command[:1] == ["--"] :] or ["bash"]
        typed = sys.stdin.isatty() and sys.stdout.isatty()
        told = {"image": chosen.image, "machine": looked_at, "more": commands.binds(chosen.mount)}
        steps = (commands.run(dies, *command, terminal=typed, **told),)
    return _carry_out(steps, chosen.dry_run)


def _integration(chosen: argparse.Namespace, machine: Machine | None) -> int:
    looked_at = machine or Machine()
    lacking = commands.missing(looked_at, chosen.dies or ()) + commands.outside(Path.cwd())
    if _refused(lacking, "this machine cannot run on an NPU", chosen.dry_run):
        return 1
    steps = commands.integration(
        chosen.dies or commands.visible_dies(looked_at) or [0],
        chosen.image,
        root=Path.cwd(),
        built=chosen.built,
        pip_config=chosen.pip_config,
        machine=looked_at,
    )
    return _carry_out(steps, chosen.dry_run)


def _refused(lacking: Sequence[str], what: str, dry_run: bool) -> bool:
    """Says what is missing, if anything is and the commands are to be run."""
    if not lacking or dry_run:
        return False
    lines = [f"{what}:", *(f"  {reason}" for reason in lacking)]
    sys.stderr.write("\n".join([*lines, "--dry-run shows the commands all the same", ""]))
    return True


def _carry_out(steps: Sequence[Step], dry_run: bool) -> int:
    for step in steps:
        _tell(str(step))
        if dry_run:
            continue
        sys.stdout.flush()
        if code := child.run(step.command):
            sys.stderr.write(f"{step.name} ended with {code}\n")
            return code
    return 0


def _tell(text: str) -> None:
    """Prints; what the output's encoding lacks (a folder's name, a variable's bytes) as its code."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relax-npu", description="The Ascend NPU backend of Relax.")
    parser.add_argument("--version", action="version", version=f"relax-npu {version('relax-npu')}")
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = subcommands.add_parser(
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
    doctor.set_defaults(run=_doctor)

    env = subcommands.add_parser("env", help="print the environment of a run, for `eval`")
    _add_dies(env, required=True)
    of = env.add_mutually_exclusive_group()
    of.add_argument("--recipe", metavar="RECIPE", help="name or file of the recipe that will run")
    of.add_argument("--colocate", action="store_true", help="trainer and engine share the dies")
    env.set_defaults(run=_env)

    schema = subcommands.add_parser("schema", help="print the operator signatures that are relied on")
    schema.set_defaults(run=_schema)

    image = subcommands.add_parser("image", help="build, run or check the image")
    actions = image.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="build it, in the root of the repository")
    _add_build(build)
    check = actions.add_parser("check", help="examine this machine from inside, compare the operators")
    _add_dies(check, required=False)
    run = actions.add_parser("run", help="run a command in it")
    _add_dies(run, required=False)
    run.add_argument(
        "--mount",
        type=_folder,
        action="append",
        default=[],
        metavar="FOLDER",
        help="a folder of this machine for models, data or runs, there under the same path; again for more",
    )
    run.add_argument(
        "command", nargs=argparse.REMAINDER, help="the command and its arguments, behind all options (bash)"
    )
    for action in (build, check, run):
        _add_image(action)
        action.set_defaults(run=_image)

    integration = subcommands.add_parser("integration", help="the whole examination on real NPUs")
    integration.add_argument("--built", action="store_true", help="take the image as it is")
    _add_build(integration)
    _add_dies(integration, required=False)
    _add_image(integration)
    integration.set_defaults(run=_integration)
    return parser


def _add_image(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--image", type=_tag, default=commands.IMAGE, help=f"its tag (default: {commands.IMAGE})"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pip-config", type=_file, metavar="FILE", help="pip's configuration for the build, as a secret"
    )


def _tag(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][\w.-]*([/:@][\w.-]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of an image, such as {commands.IMAGE}")
    return text


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file")
    return path.resolve()


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir() or "," in str(path.resolve()):
        raise argparse.ArgumentTypeError(
            f"{text} is no folder, or has a comma in its path, which docker splits"
        )
    return path.resolve()


def _add_dies(parser: argparse.ArgumentParser, *, required: bool) -> None:
    told = "physical ids, ascending: 0,1,2" + ("" if required else " (default: all)")
    parser.add_argument("--dies", type=_dies, required=required, help=told)


def _dies(text: str) -> tuple[int, ...]:
    try:
        found = parse_visible(text)
    except VisibleDevicesError as error:
        # argparse would pass over the text of another error.
        raise argparse.ArgumentTypeError(str(error)) from error
    if not found:
        raise argparse.ArgumentTypeError("no die is given; give physical ids, ascending: 0,1,2")
    return found


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0 and up to {_LONGEST_S}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
