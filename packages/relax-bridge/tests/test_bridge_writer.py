"""Writing: one step, exact sizes, byte for byte; a failing disk leaves the old directory whole."""

import errno
import json
import os
import resource
import shutil
import signal

import pytest
import torch
from relax_bridge import (
    Checkpoint,
    CheckpointError,
    CoverageError,
    safetensors_writer,
    write_checkpoint,
    writer,
)
from safetensors.torch import load_file, save_file

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(5).bfloat16(),
    "c": torch.tensor(3.0),
    "d": torch.zeros(0, 4),
}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.mkdir()
    # Spacing and an unknown key that a re-written config would lose.
    (path / "config.json").write_text('{ "model_type":"x",\n "note": "é" }')
    for name in (
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "LICENSE",
    ):
        (path / name).write_text(f"the source's own {name}")
    (path / "README.md").write_text("a card about other weights")
    (path / "optimizer.bin").write_text("junk")
    first, second = {"a": TENSORS["a"], "d": TENSORS["d"]}, {"b": TENSORS["b"], "c": TENSORS["c"]}
    save_file(first, path / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file(second, path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    where = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    where |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    index = {"metadata": {"total_size": 24 + 10 + 4}, "weight_map": dict(sorted(where.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return Checkpoint.open(path)


def listing(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


def test_unchanged_tensors_give_the_same_files_in_any_order(source, tmp_path):
    for i, order in enumerate((TENSORS, dict(reversed(TENSORS.items())))):
        out = write_checkpoint(tmp_path / f"out{i}", order, like=source)
        want = listing(source.path)
        del want["README.md"], want["optimizer.bin"]
        assert listing(out) == want


def test_the_header_keeps_its_metadata(source, tmp_path):
    save_file(TENSORS, source.path / "model.safetensors", metadata={"format": "pt", "who": "x", "a": "y"})
    (source.path / "model.safetensors.index.json").unlink()
    one = Checkpoint.open(source.path)
    out = Checkpoint.open(write_checkpoint(tmp_path / "out", TENSORS, like=one))
    assert out.metadata("model.safetensors") == {"format": "pt", "who": "x", "a": "y"}


def test_an_index_has_exact_sizes_and_each_shard_its_limit(source, tmp_path):
    out = write_checkpoint(tmp_path / "out", TENSORS, like=source, max_shard_bytes=24)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 38
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00002.safetensors" for i in (1, 2)
    ]
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(out / file)
        assert sum(x.nbytes for x in part.values()) <= 24
        assert all(index["weight_map"][name] == file for name in part)
        found |= part
    assert all(torch.equal(found[name], x) for name, x in TENSORS.items())
    assert Checkpoint.open(out).names == ("a", "b", "c", "d")


def test_a_new_model_takes_config_and_tokenizer_from_a_directory_without_weights(source, tmp_path):
    for file in source.files:
        (source.path / file).unlink()
    bare = Checkpoint.open(source.path, weights=False)
    out = write_checkpoint(tmp_path / "out", {"new": torch.ones(2)}, like=bare, config={"model_type": "y"})
    assert (out / "tokenizer.json").read_bytes() == (source.path / "tokenizer.json").read_bytes()
    assert Checkpoint.open(out).config == {"model_type": "y"}
    assert not (out / "model.safetensors.index.json").exists()


def test_tensors_are_written_in_the_source_dtype(source, tmp_path):
    wide = {name: x.double() for name, x in TENSORS.items()}
    out = Checkpoint.open(write_checkpoint(tmp_path / "out", wide, like=source))
    assert (out.dtype("a"), out.dtype("b")) == (torch.float32, torch.bfloat16)


def test_other_tensors_than_the_source_has_are_all_named(source, tmp_path):
    wrong = {"a": torch.ones(3, 2), "b": TENSORS["b"], "c": TENSORS["c"], "e": torch.ones(1)}
    with pytest.raises(CoverageError) as caught:
        write_checkpoint(tmp_path / "out", wrong, like=source)
    problems = caught.value.problems
    assert (problems.missing, problems.extra) == (("d",), ("e",))
    assert problems.mis_shaped == ("a: [3, 2], source [2, 3]",)
    assert [p.name for p in tmp_path.iterdir()] == ["source"], "nothing may be left behind"


def test_a_tensor_given_twice_is_refused(source, tmp_path):
    stream = [*TENSORS.items(), ("a", TENSORS["a"])]
    with pytest.raises(CoverageError, match="a: given twice"):
        write_checkpoint(tmp_path / "out", stream, like=source)


def full_disk(after):
    """An open that counts bytes and fails like a full disk once `after` of them are written."""
    left = after
    real = safetensors_writer.SafetensorsFile.put

    def put(self, name, tensor):
        nonlocal left
        left -= tensor.nbytes
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, name, tensor)

    return put


@pytest.mark.parametrize("after", [0, 24, 37])
@pytest.mark.parametrize("max_shard_bytes", [None, 24])
def test_a_disk_that_fills_up_leaves_the_previous_export_whole(
    source, tmp_path, monkeypatch, after, max_shard_bytes
):
    out = write_checkpoint(tmp_path / "out", TENSORS, like=source)
    before = listing(out)
    monkeypatch.setattr(safetensors_writer.SafetensorsFile, "put", full_disk(after))
    changed = {name: x + 1 for name, x in TENSORS.items()}
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(out, changed, like=source, max_shard_bytes=max_shard_bytes)
    assert listing(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("what", ["copyfile", "fsync", "rename"])
def test_a_failure_at_any_later_step_leaves_the_previous_export_whole(source, tmp_path, monkeypatch, what):
    out = write_checkpoint(tmp_path / "out", TENSORS, like=source)
    before = listing(out)

    def broken(*args, **kwargs):
        raise OSError(errno.EIO, "planted")

    if what == "copyfile":
        monkeypatch.setattr(shutil, "copyfile", broken)
    elif what == "fsync":
        monkeypatch.setattr(os, "fsync", broken)
    else:
        # The exchange is not to be had, and the second of the two renames fails.
        monkeypatch.setattr(writer, "_exchange", lambda a, b: False)
        real = type(tmp_path).rename
        monkeypatch.setattr(
            type(tmp_path), "rename", lambda self, to: broken() if ".new-" in self.name else real(self, to)
        )
    with pytest.raises(OSError, match="planted"):
        write_checkpoint(out, {name: x + 1 for name, x in TENSORS.items()}, like=source)
    monkeypatch.undo()
    assert listing(out) == before
    assert not [p for p in tmp_path.iterdir() if ".new-" in p.name]


@pytest.mark.parametrize("exchange", [True, False])
def test_an_earlier_export_is_replaced(source, tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(writer, "_exchange", lambda a, b: False)
    out = write_checkpoint(tmp_path / "out", {k: x + 1 for k, x in TENSORS.items()}, like=source)
    write_checkpoint(out, TENSORS, like=source)
    assert torch.equal(Checkpoint.open(out).tensor("a"), TENSORS["a"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_a_checkpoint_can_be_rewritten_in_place_while_it_is_read(source):
    stream = ((name, source.tensor(name)) for name in source.names)
    (source.path / "README.md").unlink()
    (source.path / "optimizer.bin").unlink()
    write_checkpoint(source.path, stream, like=source)
    assert torch.equal(Checkpoint.open(source.path).tensor("a"), TENSORS["a"])


def test_a_directory_that_holds_other_things_is_not_replaced(source, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"holds thesis\.tex, which no checkpoint has"):
        write_checkpoint(tmp_path / "home", TENSORS, like=source)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        write_checkpoint(tmp_path / "file", TENSORS, like=source)


def test_a_link_to_a_directory_keeps_pointing_there(source, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_checkpoint(tmp_path / "link", TENSORS, like=source)
    assert (tmp_path / "link").is_symlink()
    assert Checkpoint.open(tmp_path / "real").names == source.names


def killed_while_writing(source, out):
    """A process that is killed with half of a new export written."""
    tensors = iter(TENSORS.items())

    def stream():
        yield next(tensors)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        write_checkpoint(out, stream(), like=source)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def hidden(path):
    return [p for p in path.iterdir() if p.name.startswith(".")]


def test_what_a_killed_writer_left_is_removed_by_the_next(source, tmp_path, monkeypatch):
    out = write_checkpoint(tmp_path / "out", TENSORS, like=source)
    before = listing(out)
    killed_while_writing(source, out)
    assert listing(out) == before
    (left,) = hidden(tmp_path)
    write_checkpoint(out, TENSORS, like=source)
    assert hidden(tmp_path) == [left], "young enough to be of a writer that has just begun"
    os.utime(left, (0, 0))
    (tmp_path / ".outer.new-x").mkdir()
    os.utime(tmp_path / ".outer.new-x", (0, 0))
    write_checkpoint(out, TENSORS, like=source)
    assert hidden(tmp_path) == [tmp_path / ".outer.new-x"], "another directory's is none of its business"
    assert listing(out) == before


def test_the_folder_of_a_writer_at_work_stays(source, tmp_path):
    def stream():
        yield from list(TENSORS.items())[:2]
        (mine,) = hidden(tmp_path)
        os.utime(mine, (0, 0))
        write_checkpoint(tmp_path / "out", TENSORS, like=source)
        yield from list(TENSORS.items())[2:]

    write_checkpoint(tmp_path / "out", stream(), like=source)
    assert Checkpoint.open(tmp_path / "out").names == source.names
    assert hidden(tmp_path) == []


def test_a_file_that_nothing_is_left_for_is_not_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_stored", {n: at for n, at in source._stored.items() if n in {"a", "d"}})
    out = write_checkpoint(tmp_path / "out", {n: TENSORS[n] for n in "ad"}, like=source)
    assert [p.name for p in out.glob("*.safetensors")] == ["model-00001-of-00002.safetensors"]
    assert Checkpoint.open(out).names == ("a", "d")


def test_integers_are_not_written(source, tmp_path):
    bare = Checkpoint.open(source.path, weights=False)
    with pytest.raises(CheckpointError, match=r"cannot write dtype torch\.int64"):
        write_checkpoint(tmp_path / "out", {"a": torch.ones(2).long()}, like=bare)


def test_a_quantised_source_is_refused_before_anything_is_written(source, tmp_path):
    path = tmp_path / "quantised"
    shutil.copytree(source.path, path)
    save_file({"b": TENSORS["b"].to(torch.float8_e4m3fn), "c": TENSORS["c"]}, path / source.files[1])
    with pytest.raises(CoverageError, match="b: F8_E4M3"):
        write_checkpoint(tmp_path / "out", TENSORS, like=Checkpoint.open(path))


@pytest.mark.parametrize("max_shard_bytes", [None, 24])
def test_the_systems_own_refusal_to_write_leaves_the_previous_export_whole(source, tmp_path, max_shard_bytes):
    out = write_checkpoint(tmp_path / "out", TENSORS, like=source)
    before = listing(out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, limits[1]))  # bytes a file; the weight files are larger
    try:
        with pytest.raises(OSError, match="File too large"):
            write_checkpoint(out, TENSORS, like=source, max_shard_bytes=max_shard_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert listing(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
