"""The registry of rules: what objects to settings that cannot work.

A rule is one small function whose name is its id and whose docstring is its reason; it yields a `Problem`
with the field, what was given, the limit, and the nearest value that works. `relax_core.config.checks`
applies those over sections when settings are read; `shape_problems` applies those that need the model's
sizes, before a run starts and in `relax-train --plan`.
"""

from relax_core.config.rules import batches, drafts, engines, pictures
from relax_core.config.rules.rule import Check, ShapeRule

RULES: tuple[Check, ...] = (*batches.RULES, *drafts.RULES, *engines.RULES, *pictures.RULES)

__all__ = ["RULES", "Check", "ShapeRule"]
