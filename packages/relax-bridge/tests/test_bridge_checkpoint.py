"""Reading: laziness, slices, and directories that are not whole."""

import json

import pytest
import torch
from relax_bridge import Checkpoint, CheckpointError
from safetensors.torch import save_file


def sharded(path, files):
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "x"}')
    weight_map = {}
    for file, tensors in files.items():
        save_file(tensors, path / file)
        weight_map |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


TWO = {
    "a.safetensors": {"x": torch.arange(6.0).reshape(2, 3)},
    "b.safetensors": {"y": torch.ones(2).bfloat16()},
}


def test_names_shapes_dtypes_and_files(tmp_path):
    source = Checkpoint.open(sharded(tmp_path / "c", TWO))
    assert source.names == ("x", "y")
    assert (source.shape("x"), source.dtype("y"), source.file("y")) == (
        (2, 3),
        torch.bfloat16,
        "b.safetensors",
    )
    assert source.nbytes("y") == 4
    assert source.config == {"model_type": "x"}


def test_a_slice_reads_its_part(tmp_path):
    source = Checkpoint.open(sharded(tmp_path / "c", TWO))
    assert source.slice("x", slice(1, 2), slice(0, 2)).tolist() == [[3.0, 4.0]]


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has no tensor 'z'"):
        Checkpoint.open(sharded(tmp_path / "c", TWO)).tensor("z")


def test_a_directory_without_config_or_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin, convert to safetensors first"):
        Checkpoint.open(tmp_path)
    assert Checkpoint.open(tmp_path, weights=False).names == ()


def test_a_config_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds list, not an object"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_file_cut_short_is_found_on_opening(tmp_path, keep):
    path = sharded(tmp_path / "c", TWO) / "b.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(CheckpointError, match=r"b\.safetensors is not a whole safetensors file"):
        Checkpoint.open(path.parent)


def test_a_missing_file_is_named(tmp_path):
    path = sharded(tmp_path / "c", TWO)
    (path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors, which is not there"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"metadata": {}}, "no weight_map"),
        (
            {"metadata": {}, "weight_map": {"x": 3, "y": None}},
            "names 3, None; each must be the plain name",
        ),
        (
            {"weight_map": {"x": "../c/a.safetensors", "y": "s/b"}},
            r"names '\.\./c/a\.safetensors', 's/b';",
        ),
        ({"weight_map": {"x": "", "y": "."}}, r"names '', '\.'; each must be"),
        (
            {"weight_map": {"x": "..", "y": "/b.safetensors"}},
            r"names '\.\.', '/b\.safetensors'; each must",
        ),
        ({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}, 'no metadata, .* add "metadata": {}'),
    ],
)
def test_an_index_without_metadata_or_plain_names_of_files_is_refused(tmp_path, index, words):
    path = sharded(tmp_path / "c", TWO)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(path)


def test_an_index_that_lies_is_refused_both_ways(tmp_path):
    path = sharded(tmp_path / "c", TWO)
    lie = {"x": "a.safetensors", "z": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": lie}))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert "z is listed for b.safetensors, which does not hold it" in str(caught.value)
    assert "y is in b.safetensors and not listed" in str(caught.value)
