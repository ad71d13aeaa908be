"""`relax-train`: from the command line to a run. Nothing here imports torch before a run starts."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from relax_core.cli.launched import fail, follow, launched_rank, with_launched_ranks
from relax_core.cli.options import DEFAULT_RECIPE, parse_options
from relax_core.config.problems import ConfigError, Problem
from relax_core.run.files import RunDirectoryError
from relax_core.run.secrets import Masker


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line without the program's name; the process's own if None.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 refused before it began, 130 interrupted.
    """
    options, flags = parse_options(sys.argv[1:] if arguments is None else arguments)
    follows = launched_rank() > 0
    console = Console(stderr=True, quiet=follows)
    try:
        if follows and any((options.help, options.version, options.list_recipes, options.doctor)):
            return 0
        if options.help:
            return _help(options.recipe)
        if options.version:
            from relax_core import __version__

            return _say(f"relax-train {__version__}")
        if options.list_recipes:
            return _list_recipes()
        if options.doctor:
            from relax_core.cli.doctor import doctor_lines

            return _say(*doctor_lines())
        _refuse_plan_options(options)
        if options.plan:
            return _plan(options, flags)
        return _train(options.recipe, options.resume, flags, console, dry_run=options.dry_run)
    except (ConfigError, RunDirectoryError) as error:
        message = Masker()(f"relax-train: {error}")
        console.print(message, soft_wrap=True, markup=False, highlight=False)
        return fail(2) if follows else 2
    except KeyboardInterrupt:
        console.print("relax-train: interrupted")
        return 130


def _train(
    recipe: str | None, resume: str | None, flags: Sequence[str], console: Console, *, dry_run: bool
) -> int:
    from relax_core.cli import launch
    from relax_core.config.load import load_config
    from relax_core.config.yaml_text import dump_config

    if resume is not None and recipe is not None:
        raise ConfigError([Problem((), "a resumed run has its recipe already", given=f"--recipe {recipe}")])
    if resume is not None:
        config = launch.resume_config(Path(resume), flags)
    else:
        config = load_config(recipe or DEFAULT_RECIPE, with_launched_ranks(flags))
    if launched_rank() > 0:
        return 0 if dry_run else follow(config)
    if dry_run:
        return _say(Masker()(dump_config(config)).rstrip("\n"))
    if resume is not None:
        return launch.resume(Path(resume), config, console)
    return launch.start(config, recipe or DEFAULT_RECIPE, console)


def _plan(options: argparse.Namespace, flags: Sequence[str]) -> int:
    from relax_core.cli.plan import plan_text
    from relax_core.config.load import load_config

    if options.resume is not None:
        raise ConfigError([Problem((), "a run is planned before it starts", given="--plan with --resume")])
    recipe = options.recipe or DEFAULT_RECIPE
    text, works = plan_text(
        load_config(recipe, flags),
        recipe,
        device=options.plan_device,
        as_json=options.json,
        page=Path(options.plan_page) if options.plan_page else None,
    )
    _say(Masker()(text))
    return 0 if works else 2


def _refuse_plan_options(options: argparse.Namespace) -> None:
    for name in ("json", "plan_device", "plan_page"):
        if getattr(options, name) and not options.plan:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError([Problem((), "belongs to --plan", given=flag, allowed=f"--plan {flag}")])


def _help(recipe: str | None) -> int:
    from relax_core.cli.help import help_text
    from relax_core.recipes import read_recipe

    layer = read_recipe(recipe or DEFAULT_RECIPE)
    if layer.problems:
        raise ConfigError(layer.problems)
    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = min(120, shutil.get_terminal_size().columns)
    name = Path(recipe or DEFAULT_RECIPE).stem
    return _say(help_text(width=width, bold=bold, recipe=name, values=layer.values))


def _list_recipes() -> int:
    from relax_core.recipes import builtin_recipes, describe_recipe

    names = builtin_recipes()
    width = max(map(len, names))
    return _say(*(f"{name:<{width}}  {describe_recipe(file)}" for name, file in names.items()))


def _say(*lines: str) -> int:
    try:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    except OSError as error:
        # Closing again at exit would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A reader (head, less) that has seen enough is no error.
        if not isinstance(error, BrokenPipeError):
            text = f"the output cannot be written: {error.strerror}"
            raise ConfigError([Problem((), text, allowed="an output with room", given="stdout")]) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
