"""Post-training of Qwen3.5-class models on megatron-core: data, model, losses, run loop, reports."""

from importlib.metadata import version

__version__ = version("relax-core")
