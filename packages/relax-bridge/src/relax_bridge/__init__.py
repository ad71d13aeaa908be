"""Hugging Face <-> Megatron weights by a declarative, bijective map."""

from importlib.metadata import version

__version__ = version("relax-bridge")
