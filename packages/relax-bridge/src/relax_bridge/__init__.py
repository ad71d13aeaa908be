"""Hugging Face <-> Megatron weights by a declarative, bijective map."""

from importlib.metadata import version

from relax_bridge.checkpoint import Checkpoint
from relax_bridge.errors import (
    BridgeError,
    CheckpointError,
    ConfigError,
    CoverageError,
    MtpMismatchError,
    Problems,
)
from relax_bridge.model_map import ModelMap
from relax_bridge.models import model_map
from relax_bridge.writer import write_checkpoint

__version__ = version("relax-bridge")

__all__ = [
    "BridgeError",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "CoverageError",
    "ModelMap",
    "MtpMismatchError",
    "Problems",
    "model_map",
    "write_checkpoint",
]
