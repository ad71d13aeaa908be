"""What `--plan --json` prints: exactly the fields that are listed, each of the kind that is said."""

import json

import pytest
from relax_core.config import load_config
from relax_core.plan import plan
from relax_core.plan.fields import FIELDS, VERSION
from relax_core.plan.text import plan_lines, plan_values

KINDS = {"integer": int, "bytes": int, "seconds": float, "number": (int, float), "text": str, "boolean": bool}
CASES = {
    "qwen35-9b-mtp-8xnpu-thd": (),
    "qwen35-35b-a3b-16xnpu-thd": ("--sglang.memory_fraction", "0.9"),
    "qwen35-35b-a3b-sft-mtp-8xnpu": (),
    "quickstart": ("--mtp.layers", "3"),
}


def values_of(recipe, *flags):
    made = plan(load_config(recipe, flags), recipe=recipe)
    return json.loads(json.dumps(plan_values(made), allow_nan=False))


def leaves(value, path=""):
    """Paths and values; an object whose names depend on the run is one value."""
    if isinstance(value, dict) and " by " not in FIELDS.get(path, ("",))[0]:
        for name, one in value.items():
            yield from leaves(one, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, f"{path}[]")
    else:
        yield path, value


@pytest.mark.parametrize(("recipe", "flags"), CASES.items())
def test_every_field_is_listed_and_of_its_kind(recipe, flags):
    for path, value in leaves(values_of(recipe, *flags)):
        kind = FIELDS[path][0]
        if value is None:
            assert "null" in kind, path
            continue
        kind, _, by = kind.removesuffix(" or null").partition(" by ")
        for one in value.values() if by else (value,):
            assert isinstance(one, KINDS[kind]), (path, one)
            assert not isinstance(one, bool) or kind == "boolean", path


def test_every_listed_field_is_printed():
    printed = {path for recipe, flags in CASES.items() for path, _ in leaves(values_of(recipe, *flags))}
    no_drafts = values_of("quickstart", "--mtp.layers", "0", "--mtp.init", "truncate",
                          "--mtp.loss_coefficient", "0")  # fmt: skip
    printed |= {path for path, _ in leaves(no_drafts)}
    assert printed == set(FIELDS)
    assert no_drafts["version"] == VERSION == 1


@pytest.mark.parametrize(
    ("recipe", "flags", "words"),
    [
        (
            "qwen35-9b-mtp-8xnpu-thd",
            (),
            "start: relax-train --recipe qwen35-9b-mtp-8xnpu-thd, which starts a Ray",
        ),
        ("qwen35-9b-mtp-8xnpu-thd", ("--cluster.address", "head:6379"), "joins the Ray at head:6379"),
        ("qwen35-35b-a3b-32xnpu-tuned", (), "first of 2 hosts of 16 devices"),
        (
            "qwen35-35b-a3b-32xnpu-tuned",
            (),
            "ray job submit --working-dir . -- relax-train --recipe qwen35-35b",
        ),
    ],
)
def test_a_plan_on_ray_says_how_to_start(recipe, flags, words):
    assert words in " ".join(plan(load_config(recipe, flags), recipe=recipe).notes)
    assert not any("start:" in note for note in plan(load_config("quickstart"), recipe="quickstart").notes)


@pytest.mark.parametrize("device", ["h100", "a100", "910c-die"])
def test_shares_of_rates_that_nobody_measured_are_said_to_be_assumed(device):
    made = plan(load_config("math-rl"), device=device)
    text = "\n".join(plan_lines(made))
    assert (
        f"assumed: on {device} operators reach the shares of its rates that were measured on an H200" in text
    )
    assert f"figures of {device}: {made.device.source}" in text
    assert "TB/s" in made.device.source or "GB/s" in made.device.source
    assert not any("were measured on" in note for note in plan(load_config("math-rl"), device="h200").notes)
