"""Whole checkpoints from Hugging Face directories to Megatron's distributed ones, and back."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from relax_bridge.checkpoint import Checkpoint
from relax_bridge.dist_checkpoint import DistCheckpoint, Report, write_dist_checkpoint
from relax_bridge.errors import MtpMismatchError
from relax_bridge.models import model_map
from relax_bridge.mtp import MtpInit, adapt_mtp
from relax_bridge.writer import write_checkpoint


def hf_to_megatron(
    source: str | Path,
    out_dir: str | Path,
    *,
    mtp_layers: int | None = None,
    mtp_init: MtpInit | None = None,
    mtp_std: float | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> Path:
    """Writes a Hugging Face checkpoint as a distributed one that any layout can load.

    Args:
        source: the Hugging Face directory.
        out_dir: the directory to make; replaced at the very end.
        mtp_layers: the number of MTP layers of the model; by default the config's.
        mtp_init: what to do if the checkpoint has another number (see `adapt_mtp`).
        mtp_std: for `random`.
        seed: for `random`.
        report: called with (bytes done, bytes in all).

    Raises:
        BridgeError: the checkpoint is not exactly the model of its config; everything wrong is named.
    """
    checkpoint = Checkpoint.open(source)
    table = model_map(checkpoint.config, names=checkpoint.names, mtp_layers=mtp_layers)
    adapted = adapt_mtp(checkpoint, table, init=mtp_init, std=mtp_std, seed=seed)
    return write_dist_checkpoint(out_dir, table, adapted, report=report)


def megatron_to_hf(
    source: str | Path,
    out_dir: str | Path,
    *,
    like: str | Path,
    mtp_layers: int | None = None,
    max_shard_bytes: int | None = None,
    report: Report | None = None,
) -> Path:
    """Writes the weights of a distributed checkpoint, of whatever layout, as a Hugging Face directory.

    Args:
        source: the distributed checkpoint; optimizer state in it is left alone.
        out_dir: the directory to make; replaced at the very end.
        like: the Hugging Face directory that training started from: it gives config, tokenizer, dtypes, the
            way of sharding, and the tensors that the trainer does not hold.
        mtp_layers: the number of MTP layers, where it is not that of `like`.
        max_shard_bytes: see `write_checkpoint`.
        report: called with (bytes done, bytes in all).

    Raises:
        BridgeError: the weights are not exactly those of the model; everything wrong is named.
    """
    stored, original = DistCheckpoint.open(source), Checkpoint.open(like)
    table = model_map(original.config, names=original.names, mtp_layers=mtp_layers)
    if stored.mtp_layers != table.mtp_layers:
        raise MtpMismatchError(
            f"{stored.path} holds {stored.mtp_layers} MTP layers and the model has {table.mtp_layers}; give "
            f"--mtp-layers {stored.mtp_layers} to export those that were trained"
        )
    fewer = (
        mtp_layers is not None and mtp_layers < model_map(original.config, names=original.names).mtp_layers
    )
    # The values come from the distributed checkpoint: only names, dtypes and files of the view matter.
    view = adapt_mtp(original, table, init="truncate" if fewer else "random", std=1.0)
    tensors = table.export_tensors(stored.megatron_tensors(table), like=view)
    reported = _reporting(tensors, sum(map(view.nbytes, view.names)), report) if report else tensors
    return write_checkpoint(out_dir, reported, like=view, max_shard_bytes=max_shard_bytes)


def _reporting(
    tensors: Iterable[tuple[str, Tensor]], total: int, report: Report
) -> Iterator[tuple[str, Tensor]]:
    done = 0
    for name, tensor in tensors:
        yield name, tensor
        done += tensor.nbytes
        report(done, total)
