"""Writes Megatron's torch_dist checkpoints inside the calling process.

Megatron's own writer forks a process per file behind a spawned manager, which re-imports the user's main
module and forks a process whose operator threads already run. This one hands the same plan to torch's plain
file writer; the files are the same format and `dist_checkpointing.load` reads them.
"""

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save


class TorchDistWriter(SaveShardedStrategy):  # type: ignore[misc]
    """Saving strategy for `megatron.core.dist_checkpointing.save`.

    Args:
        later: `save` only takes what is to be written, and `write` writes it.
        copy: whether to take a copy on the host, so that training can go on before `write` is done.
    """

    def __init__(self, *, later: bool = False, copy: bool = False) -> None:
        super().__init__("torch_dist", 1)
        self._later = later
        self._copy = copy
        self._taken: tuple[dict[str, Any], Path] | None = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Takes the sharded tensors and objects of this rank, and writes them unless that comes later."""
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        if self._copy:
            for shards in renamed.values():
                for shard in shards:
                    if isinstance(shard, ShardedTensor):
                        shard.data = shard.data.detach().to("cpu", copy=True)
        self._taken = mcore_to_pyt_state_dict(renamed, False), Path(checkpoint_dir)
        if not self._later:
            self.write()

    def write(self, group: Any = None) -> None:
        """Writes what was taken; all ranks must call it.

        Args:
            group: process group for what the ranks tell one another meanwhile; the default one if None.
        """
        assert self._taken is not None, "nothing was taken"
        state, directory = self._taken
        self._taken = None
        save(
            state,
            storage_writer=FileSystemWriter(directory, sync_files=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects are written beside the tensors."""
        return True
