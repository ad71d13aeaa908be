"""The options of `relax-train` beside the settings themselves."""

import argparse
from collections.abc import Sequence

DEFAULT_RECIPE = "quickstart"


def parse_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits the command line.

    Args:
        arguments: without the program's name.

    Returns:
        The options (recipe, resume, dry_run, plan and those that belong to it, list_recipes, doctor, version,
        help), and what is left: the dotted flags of settings, unread.
    """
    parser = argparse.ArgumentParser("relax-train", add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", metavar="NAME|PATH")
    parser.add_argument("--resume", metavar="RUN_DIR")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plan-device", metavar="NAME")
    parser.add_argument("--plan-page", metavar="FILE")
    parser.add_argument("--list-recipes", action="store_true")
    parser.add_argument("--doctor", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    return parser.parse_known_args(arguments)
