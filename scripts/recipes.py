"""Writes docs/recipes.md and docs/rules.md: recipes as they are planned, and the rules of settings."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from relax_core.config import load_config
from relax_core.config.checks import CHECKS
from relax_core.config.rules.rule import Check, ShapeRule
from relax_core.config.rules.shapes import SHAPE_RULES
from relax_core.plan import DEVICES, Plan, plan
from relax_core.recipes import STATUS, builtin_recipes, describe_recipe, recipe_status

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECIPES, RULES = DOCS / "recipes.md", DOCS / "rules.md"
_HEAD = """# Recipes

Written by `nox -s docs` from the recipes that ship with relax-core; a test compares. `relax-train
--recipe NAME` starts one, `relax-train --plan --recipe NAME` explains it, and a YAML file of your own
with `extends: NAME` changes what you need. A name tells the model, what is trained (`sft`; else GRPO),
`mtp` (the draft layer is trained, and drafts while sampling), `cp` (rows shared by context-parallel
ranks), and the devices: `8xnpu` are 8 dies, which are 4 Ascend 910C cards. Rows are packed in all of
them. Give your own checkpoint with `--model.path`.

Memory is the fullest device's, time and tokens those of a whole step, as planned on the device named, for
prompts of 512 tokens and completions of half the longest on average; on devices other than an H200
operators are assumed to reach the same shares of their rates. What a plan is worth:
[benchmarks/plan](../benchmarks/plan/README.md).

"""
_RULES_HEAD = """# Rules of settings

Written by `nox -s docs` from the registry; a test compares. A rule is a small function in
`relax_core.config`; its refusal names the setting, what was given, the limit and the nearest value that
works. Those of the first table are applied whenever settings are read, those of the second once the
model's sizes are known: by `relax-train --plan`, and before a run starts. The plan adds what does not fit
into a device's memory. Settings that contradict others of their own section are refused there.

"""


def table(header: list[str], rows: Iterator[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows]) + "\n"


def recipes_page() -> str:
    """All of docs/recipes.md."""
    text = _HEAD + table(
        ["recipe", "layout", "recompute", "planned on", "memory, GiB", "step, s", "tokens/s", "status"],
        (recipe_row(name) for name in builtin_recipes()),
    )
    text += "\n*Status*: " + "; ".join(f"**{word}** {meaning}" for word, meaning in STATUS.items()) + ".\n\n"
    text += "".join(f"- `{name}`: {describe_recipe(file)}\n" for name, file in builtin_recipes().items())
    text += "\nThe devices that a plan knows (`--plan-device`):\n\n"
    text += table(
        ["name", "memory, GiB", "bfloat16, TFLOP/s", "memory, TB/s", "source"],
        (
            [
                spec.name,
                f"{spec.memory / 2**30:.1f}",
                f"{spec.flops / 1e12:g}",
                f"{spec.bandwidth / 1e12:g}",
                spec.source,
            ]
            for spec in DEVICES.values()
        ),
    )
    return text


def recipe_row(name: str) -> list[str]:
    """What is in a recipe and what the plan says of it."""
    config = load_config(name)
    made = plan(config, recipe=name)
    trainer = config.trainer
    where = made.device.name if config.run.device != "cpu" else "-"
    full = max(use.peak for use in made.devices) / 2**30
    rate = made.tokens_per_step / made.step_seconds
    figures = [f"{full:.0f}", f"{made.step_seconds:.0f}", f"{rate:.0f}"] if where != "-" else ["-"] * 3
    count = f"{len(made.devices)} x {where}" if where != "-" else "cpu"
    return [
        f"`{name}`",
        layout(made),
        trainer.recompute,
        count,
        *figures,
        recipe_status(builtin_recipes()[name]),
    ]


def layout(made: Plan) -> str:
    """TP4 CP4 and so on."""
    assert made.trainer is not None
    sizes = made.trainer.layout
    short = {"tensor": "TP", "context": "CP", "pipeline": "PP", "expert": "EP", "data": "DP"}
    found = [
        f"{letters}{getattr(sizes, axis)}" for axis, letters in short.items() if getattr(sizes, axis) > 1
    ]
    return " ".join(found) or "one rank"


def rules_page() -> str:
    """All of docs/rules.md."""
    text = _RULES_HEAD + f"{len(CHECKS)} rules over settings:\n\n"
    text += table(["rule", "reads", "why"], (rule_row(check) for check in CHECKS))
    text += f"\n{len(SHAPE_RULES)} rules over settings and the model's sizes:\n\n"
    return text + table(["rule", "reads", "why"], (rule_row(rule) for rule in SHAPE_RULES))


def rule_row(rule: Check | ShapeRule) -> list[str]:
    """Its name, the sections it reads, its reason."""
    sections = ", ".join(rule.sections) if isinstance(rule, Check) else "all, and config.json"
    return [f"`{rule.id}`", sections, reason(rule.rule, rule.id)]


def reason(function: Callable[..., object], name: str) -> str:
    """The docstring in one line; the name as a sentence where there is none."""
    text = " ".join((function.__doc__ or "").split())
    return text or f"{name.replace('-', ' ').capitalize()}."


def main() -> None:
    """Prints the pages, or writes them."""
    parser = argparse.ArgumentParser(description="The pages docs/recipes.md and docs/rules.md.")
    parser.add_argument("--write", action="store_true", help="write them")
    if parser.parse_args().write:
        RECIPES.write_text(recipes_page())
        RULES.write_text(rules_page())
    else:
        print(recipes_page(), rules_page(), sep="\n", end="")


if __name__ == "__main__":
    main()
