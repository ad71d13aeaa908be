"""Writes docs/recipes.md, docs/plan.md and docs/rules.md: recipes, what a plan is, the rules of settings."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from relax_core.config import load_config
from relax_core.config.checks import CHECKS
from relax_core.config.rules.rule import Check, ShapeRule
from relax_core.config.rules.shapes import SHAPE_RULES
from relax_core.plan import DEVICES, DeviceSpec, Plan, plan
from relax_core.plan.fields import FIELDS
from relax_core.recipes import STATUS, builtin_recipes, describe_recipe, recipe_status

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECIPES, PLAN, RULES = DOCS / "recipes.md", DOCS / "plan.md", DOCS / "rules.md"
_HEAD = """# Recipes

Written by `nox -s docs` from the recipes that ship with relax-core; a test compares. `relax-train
--recipe NAME` starts one, `relax-train --plan --recipe NAME` explains it, and a YAML file of your own
with `extends: NAME` changes what you need. A name tells the model, what is trained (`sft`; else GRPO),
`mtp` (the draft layer is trained, and drafts while sampling), `cp` (rows shared by context-parallel
ranks), and the devices: `8xnpu` are 8 dies, which are 4 Ascend 910C cards. Rows are packed in all of
them. Give your own checkpoint with `--model.path`.

Memory is the fullest device's, time and tokens those of a whole step, as planned on the device named, for
prompts of 512 tokens and completions of half the longest on average. What a plan is and is worth, and the
devices that it knows: [plan.md](plan.md).

"""
_PLAN_HEAD = """# The plan

Written by `nox -s docs`; a test compares. `relax-train --plan` needs no device, no weights and no torch. It
checks the settings, sums what every device holds in every phase of a step (sampling, training, the update of
weights), and the time of each phase. It ends with 0 where the run can work and with 2 where it cannot, and
then says of each refused setting what was given, the limit, the reason and the nearest that works. A launch
runs the same checks first. `--plan-page FILE` draws the bars of each device, `--plan-device NAME` takes
another device, `--json` prints plain values.

**Memory.** The trainer is a list of operations with the bytes that each keeps, makes and needs for itself,
run forth and back in the mind; log-probabilities pass in slices of the vocabulary of at most 2^27 float32
logits. Weights, gradients and states equal those of full models to the byte, but for padding. SGLang's caches
are sized by its own rules. An update holds the new version beside the old one until it is whole: what is
packed, what passes and what is staged is counted. Measured peaks:
[benchmarks/plan](../benchmarks/plan/README.md).

**Time.** An operation takes the longer of its arithmetic and its reads and writes, at shares of the device's
rates; what ranks send to one another comes on top, and a pass takes no less than the host needs to launch it.

**Assumed.** Lengths of prompts and completions (no data is read), that 65 % of drafts stand, graphs and
workspaces of an engine (2 GiB, 1 GiB at rest), time of a decoding step beside reading (2 ms, NPU 5 ms), 1.2
GB/s of weights through a host's memory as measured on that of an H200. Shares of rates are measured on an
H200 alone; for H100, A100 and 910C dies **the same shares are assumed**, which nobody has measured, and
every plan for them says so.

## Devices

`--plan-device` takes one of these; links are one way, to a device of the same host and of another.

"""
_FIELDS_HEAD = """
## Fields of `--json`

Bytes, seconds and tokens. `x[]` is a list, "by" an object whose names depend on the run. `trainer` is missing
where the model's sizes are refused, `engine` and `rollout` where nothing is sampled.

"""
_RULES_HEAD = """# Rules of settings

Written by `nox -s docs` from the registry; a test compares. A rule is a small function in
`relax_core.config`; its refusal names the setting, what was given, the limit and the nearest value that
works. Those of the first table are applied whenever settings are read, those of the second once the
model's sizes are known: by `relax-train --plan`, and before a run starts. The plan adds what does not fit
into a device's memory. Settings that contradict others of their own section are refused there.

"""


def table(header: list[str], rows: Iterable[list[str]]) -> str:
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
    return text


def plan_page() -> str:
    """All of docs/plan.md."""
    header = ["name", "memory, GiB", "bfloat16, TFLOP/s", "memory, TB/s", "links, GB/s", "shares", "source"]
    text = _PLAN_HEAD + table(header, map(device_row, DEVICES.values()))
    shares = asdict(DEVICES["h200"].shares)
    shares.pop("measured")
    text += "\nShares of the matrix rate, of the memory's bandwidth and of links: "
    text += ", ".join(f"{kind.replace('_', ' ')} {share:g}" for kind, share in shares.items()) + ".\n"
    rows = ([f"`{path}`", kind, meaning] for path, (kind, meaning) in FIELDS.items())
    return text + _FIELDS_HEAD + table(["field", "kind", "meaning"], rows)


def device_row(spec: DeviceSpec) -> list[str]:
    """Its figures, and whether the shares of them are measured."""
    return [
        f"`{spec.name}`",
        f"{spec.memory / 2**30:.1f}",
        f"{spec.flops / 1e12:g}",
        f"{spec.bandwidth / 1e12:g}",
        f"{spec.link / 1e9:g}, {spec.network / 1e9:g}",
        "measured" if spec.shares.measured else "assumed",
        spec.source,
    ]


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
    parser = argparse.ArgumentParser(description="The pages docs/recipes.md, docs/plan.md and docs/rules.md.")
    parser.add_argument("--write", action="store_true", help="write them")
    if parser.parse_args().write:
        RECIPES.write_text(recipes_page())
        PLAN.write_text(plan_page())
        RULES.write_text(rules_page())
    else:
        print(recipes_page(), plan_page(), rules_page(), sep="\n", end="")


if __name__ == "__main__":
    main()
