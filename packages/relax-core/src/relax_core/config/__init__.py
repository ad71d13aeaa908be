"""Typed configuration: each component declares its own `Section`; the root config only composes them.

`RelaxConfig` and the functions around it load on first use, because they import every component's sections.
"""

from typing import TYPE_CHECKING

from relax_core.config.section import Section, setting
from relax_core.lazy import lazy_names

if TYPE_CHECKING:
    from relax_core.config.load import load_config, resolve
    from relax_core.config.problems import ConfigError, Problem
    from relax_core.config.root import RelaxConfig
    from relax_core.config.yaml_text import dump_config

__all__ = [
    "ConfigError",
    "Problem",
    "RelaxConfig",
    "Section",
    "dump_config",
    "load_config",
    "resolve",
    "setting",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ConfigError": "problems",
        "Problem": "problems",
        "RelaxConfig": "root",
        "dump_config": "yaml_text",
        "load_config": "load",
        "resolve": "load",
    },
)
