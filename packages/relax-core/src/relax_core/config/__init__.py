"""Typed configuration: each component declares its own `Section`; the root config only composes them."""

from relax_core.config.section import Section, setting

__all__ = ["Section", "setting"]
