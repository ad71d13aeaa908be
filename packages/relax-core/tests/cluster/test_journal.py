"""What is remembered since a checkpoint."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from relax_core.cluster.journal import Journal
from relax_core.cluster.shared_tensors import pack, unpack


def test_calls_come_back_in_order_until_a_checkpoint_holds_them(tmp_path):
    journal = Journal()
    journal.add(("first", torch.arange(3)))
    journal.add(("second", None))
    assert [call[0] for call in journal.calls()] == ["first", "second"]
    assert next(journal.calls())[1].tolist() == [0, 1, 2]
    journal.mark(tmp_path)
    journal.add(("third",))
    assert (journal.base, len(journal)) == (None, 3)
    journal.confirm()
    assert (journal.base, [call[0] for call in journal.calls()]) == (tmp_path, ["third"])
    journal.mark(tmp_path / "never")
    journal.withdraw()
    journal.confirm()
    assert (journal.base, len(journal)) == (tmp_path, 1)
    journal.close()


def test_tensors_keep_their_bits_shape_and_dtype():
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "column": torch.randn(4, 6)[:, 1],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    back = unpack(pack(tensors))
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_folders_of_killed_processes_are_removed_and_those_of_others_stay():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    left = Path(tempfile.mkdtemp(prefix=f"relax-journal-{child.pid}-", dir="/tmp"))
    other = Path(tempfile.mkdtemp(prefix=f"relax-journal-{os.getppid()}-", dir="/tmp"))
    try:
        journal = Journal()
        assert not left.exists()
        assert other.exists()
        journal.close()
        assert not list(Path("/tmp").glob(f"relax-journal-{os.getpid()}-*"))
    finally:
        other.rmdir()
