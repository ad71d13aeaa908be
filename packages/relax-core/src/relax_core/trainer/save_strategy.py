"""Writes Megatron's torch_dist checkpoints inside the calling process.

Megatron's own writer forks a process per file behind a spawned manager, which re-imports the user's main
module and forks a process whose operator threads already run. This one hands the same plan to torch's plain
file writer; the files are the same format and `dist_checkpointing.load` reads them.
"""

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save


class TorchDistWriter(SaveShardedStrategy):  # type: ignore[misc]
    """Saving strategy for `megatron.core.dist_checkpointing.save`."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Writes the sharded tensors and objects of all ranks to `checkpoint_dir`."""
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=FileSystemWriter(checkpoint_dir, sync_files=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects are written beside the tensors."""
        return True
