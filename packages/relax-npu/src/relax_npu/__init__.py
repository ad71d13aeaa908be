"""The Ascend NPU backend of Relax: importable everywhere, honest about what a device must confirm."""

from importlib.metadata import version

__version__ = version("relax-npu")
