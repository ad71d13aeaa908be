"""Operators of Qwen3.5-class models: one reference each, fast backends beside it."""

from importlib.metadata import version

__version__ = version("relax-kernels")
