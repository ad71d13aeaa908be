"""`relax-train --plan`: memory and time of a run before it starts, or why it cannot work."""

import json
from collections.abc import Iterator
from pathlib import Path

from relax_core.config.problems import ConfigError, Problem
from relax_core.config.root import RelaxConfig
from relax_core.run.files import write_atomic


def plan_text(
    config: RelaxConfig, recipe: str, *, device: str | None, as_json: bool, page: Path | None
) -> tuple[str, bool]:
    """The plan as text, and whether the run can work.

    Args:
        config: the resolved settings.
        recipe: their name.
        device: name in the plan's table of devices.
        as_json: plain values instead of lines.
        page: a file for the picture.

    Raises:
        ConfigError: there is no such device or model, or the page cannot be written.
    """
    from relax_core.model.config import UnsupportedModelError
    from relax_core.plan.build import plan
    from relax_core.plan.page import render_plan
    from relax_core.plan.shapes import UnknownModelError
    from relax_core.plan.text import plan_lines, plan_values

    try:
        made = plan(config, recipe=recipe, device=device)
    except (UnknownModelError, UnsupportedModelError) as error:
        raise ConfigError(list(_unreadable_models(config))) from error
    except ValueError as error:
        raise ConfigError([Problem((), str(error), given=device, origin="--plan-device")]) from error
    if page is not None:
        write_atomic(page, render_plan(made).encode())
    if as_json:
        return json.dumps(plan_values(made), indent=1), not made.problems
    return "\n".join(plan_lines(made)), not made.problems


def _unreadable_models(config: RelaxConfig) -> Iterator[Problem]:
    """Every checkpoint of a run whose sizes cannot be found or trained."""
    from relax_core.model.config import Qwen35Config, UnsupportedModelError
    from relax_core.plan.shapes import UnknownModelError, model_facts

    vision = config.model.vision != "absent"
    named = {
        ("model", "path"): config.model.path,
        ("model", "reference_path"): config.model.reference_path,
        ("teacher", "path"): config.teacher.path,
        ("critic", "path"): config.critic.path,
    }
    for path, given in named.items():
        if given is None:
            continue
        try:
            Qwen35Config.from_hf(model_facts(given), vision=vision)
        except (UnknownModelError, UnsupportedModelError) as error:
            yield Problem(
                path, str(error), given=given, allowed="a checkpoint of a Qwen3.5 model, or its name"
            )


def shape_refusals(config: RelaxConfig) -> Iterator[Problem]:
    """What cannot work with the checkpoint's sizes; nothing where they cannot be read, which others say."""
    from relax_core.config.rules.shapes import shape_problems
    from relax_core.model.config import Qwen35Config, UnsupportedModelError
    from relax_core.plan.shapes import UnknownModelError, model_facts

    try:
        model = Qwen35Config.from_hf(model_facts(config.model.path))
    except (UnknownModelError, UnsupportedModelError):
        return
    yield from shape_problems(config, model)
