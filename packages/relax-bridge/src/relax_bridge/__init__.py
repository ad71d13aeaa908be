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
from relax_bridge.exchange import Exchange, ProcessGroupExchange
from relax_bridge.layout import Layout
from relax_bridge.model_map import ModelMap
from relax_bridge.models import model_map
from relax_bridge.mtp import adapt_mtp
from relax_bridge.placement import Placement, Shard
from relax_bridge.sharded_export import HfShard, export_buckets, export_shards
from relax_bridge.sharded_import import import_shards
from relax_bridge.writer import write_checkpoint

__version__ = version("relax-bridge")

__all__ = [
    "BridgeError",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "CoverageError",
    "Exchange",
    "HfShard",
    "Layout",
    "ModelMap",
    "MtpMismatchError",
    "Placement",
    "Problems",
    "ProcessGroupExchange",
    "Shard",
    "adapt_mtp",
    "export_buckets",
    "export_shards",
    "import_shards",
    "model_map",
    "write_checkpoint",
]
