"""Conversion to and from Megatron's distributed checkpoints, without Megatron."""

import errno
import json
import os
import pickle
import random
import re
import resource
import subprocess
import sys

import pytest
import torch
from relax_bridge import Checkpoint, CheckpointError, CoverageError, MtpMismatchError, model_map
from relax_bridge.cli import main
from relax_bridge.convert import hf_to_megatron, megatron_to_hf
from relax_bridge.dist_checkpoint import DistCheckpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save


def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


def read(path):
    """All tensors of a distributed checkpoint, by torch's own loader."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    state = {key: torch.empty(item.size, dtype=item.properties.dtype) for key, item in metadata.items()}
    load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state


def write(path, state):
    """The same by torch's own saver."""
    save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({}, path / "common.pt")
    return path


@pytest.mark.parametrize("kind", ["dense", "moe", "packed everywhere"])
def test_there_and_back_gives_the_very_files(make, tiny_config, moe_config, tmp_path, kind):
    packed = ["mtp.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj"]
    source = make(
        tiny_config() if kind == "dense" else moe_config(), names=packed if "packed" in kind else None
    )
    there = hf_to_megatron(source.path, tmp_path / "megatron")
    back = megatron_to_hf(there, tmp_path / "back", like=source.path)
    assert files(back) == files(source.path)


def test_torch_reads_the_keys_and_values_that_the_trainer_has(make, moe_config, tmp_path):
    source = make(moe_config())
    state = read(hf_to_megatron(source.path, tmp_path / "megatron"))
    at = "decoder.layers.0.self_attention."
    assert torch.equal(
        state[at + "in_proj.weight.z"], source.tensor("model.layers.0.linear_attn.in_proj_z.weight")
    )
    conv = source.tensor("model.layers.0.linear_attn.conv1d.weight")
    assert torch.equal(torch.cat([state[f"{at}conv1d.weight.{part}"] for part in "qkv"]), conv)
    gates = source.tensor("model.layers.0.mlp.experts.gate_up_proj")[:, :6]
    assert torch.equal(state["decoder.layers.0.mlp.experts.linear_fc1.weight.gate"], gates)
    assert state[at + "A_log"].dtype == torch.float32
    assert torch.equal(state["mtp.layers.0.eh_proj.weight"], source.tensor("mtp.fc.weight"))
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in state


def test_padding_and_optimizer_state_are_left_behind(make, tiny_config, tmp_path):
    source = make(tiny_config())
    state = read(hf_to_megatron(source.path, tmp_path / "megatron"))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        state[name] = torch.cat([state[name], torch.full((14, 16), 7.0).bfloat16()])
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(3)
    back = megatron_to_hf(write(tmp_path / "padded", state), tmp_path / "back", like=source.path)
    assert files(back) == files(source.path)


def test_all_that_is_wrong_with_a_distributed_checkpoint_is_named_at_once(make, tiny_config, tmp_path):
    source = make(tiny_config())
    state = read(hf_to_megatron(source.path, tmp_path / "megatron"))
    del state["decoder.layers.0.self_attention.in_proj.weight.b"]
    state["adapter.weight"] = torch.ones(1)
    state["decoder.final_layernorm.weight"] = torch.ones(3)
    with pytest.raises(CoverageError) as caught:
        megatron_to_hf(write(tmp_path / "odd", state), tmp_path / "back", like=source.path)
    problems = caught.value.problems
    assert problems.missing == ("decoder.layers.0.self_attention.in_proj.weight.b",)
    assert problems.extra == ("adapter.weight",)
    assert problems.mis_shaped == ("decoder.final_layernorm.weight: [3], the table says [16]",)
    assert not (tmp_path / "back").exists()


def test_other_formats_and_unfinished_writes_are_refused(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="has the format 'zarr'; only 'torch_dist' is known"):
        DistCheckpoint.open(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(CheckpointError, match="not written to its end"):
        DistCheckpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="cannot read nowhere"):
        DistCheckpoint.open("nowhere")


def test_a_data_file_cut_short_is_named(make, tiny_config, tmp_path):
    source = make(tiny_config())
    there = hf_to_megatron(source.path, tmp_path / "megatron")
    (data,) = there.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"cannot read [a-z_.0-9A-Z]+:"):
        megatron_to_hf(there, tmp_path / "back", like=source.path)
    assert not (tmp_path / "back").exists()


def test_each_tensor_is_read_when_it_is_written(make, tiny_config, tmp_path, monkeypatch):
    """Two tensors at a time at most live in memory: the one that is written and the one before."""
    from relax_bridge import dist_checkpoint

    source, alive, most = make(tiny_config()), [], []
    real = dist_checkpoint.read_pieces

    def watched(checkpoint, entry, axis, pieces, out):
        import weakref

        alive.append(weakref.ref(out))
        most.append(sum(one() is not None for one in alive))
        real(checkpoint, entry, axis, pieces, out)

    monkeypatch.setattr(dist_checkpoint, "read_pieces", watched)
    hf_to_megatron(source.path, tmp_path / "megatron")
    assert len(most) > 50
    assert max(most) <= 2


@pytest.mark.parametrize("room", [300, 20_000, 200_000])
@pytest.mark.parametrize("way", ["hf-to-megatron", "megatron-to-hf"])
def test_a_full_disk_leaves_the_previous_one_whole(make, tiny_config, tmp_path, capsys, room, way):
    # An embedding larger than the buffers of files: torch fails in the middle of its archive.
    source = make(tiny_config(vocab_size=5000))
    there = hf_to_megatron(source.path, tmp_path / "megatron")
    back = megatron_to_hf(there, tmp_path / "back", like=source.path)
    out = there if way == "hf-to-megatron" else back
    begin = source.path if way == "hf-to-megatron" else there
    before = files(out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        like = ["--like", str(source.path)] if way == "megatron-to-hf" else []
        status = main(["convert", way, str(begin), str(out), *like])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2
    assert os.strerror(errno.EFBIG) in capsys.readouterr().err
    assert files(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "megatron", "source"]


def test_a_directory_that_holds_other_things_is_not_replaced(make, tiny_config, tmp_path):
    source = make(tiny_config())
    with pytest.raises(CheckpointError, match=r"holds config\.json, model\.safetensors, which no checkpoint"):
        hf_to_megatron(source.path, source.path)


def test_more_mtp_layers_are_converted_as_asked_and_exported_as_trained(make, tiny_config, tmp_path):
    source = make(tiny_config())
    with pytest.raises(MtpMismatchError, match="holds 1 MTP layers and the model has 2"):
        hf_to_megatron(source.path, tmp_path / "megatron", mtp_layers=2)
    there = hf_to_megatron(source.path, tmp_path / "megatron", mtp_layers=2, mtp_init="copy")
    with pytest.raises(MtpMismatchError, match="holds 2 MTP layers and the model has 1; give --mtp-layers 2"):
        megatron_to_hf(there, tmp_path / "back", like=source.path)
    back = Checkpoint.open(megatron_to_hf(there, tmp_path / "back", like=source.path, mtp_layers=2))
    assert torch.equal(back.tensor("mtp.layers.1.fc.weight"), source.tensor("mtp.fc.weight"))
    assert model_map(back.config, names=back.names).mtp_layers == 2
    fewer = hf_to_megatron(source.path, tmp_path / "none", mtp_layers=0, mtp_init="truncate")
    bare = Checkpoint.open(megatron_to_hf(fewer, tmp_path / "bare", like=source.path, mtp_layers=0))
    assert not any(name.startswith("mtp.") for name in bare.names)


def test_the_command_converts_both_ways(make, tiny_config, tmp_path, capsys):
    source = make(tiny_config())
    assert main(["convert", "hf->megatron", str(source.path), str(tmp_path / "m"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == sum(len(data) for data in files(tmp_path / "m").values())
    like = ["--like", str(source.path)]
    assert main(["convert", "megatron-to-hf", str(tmp_path / "m"), str(tmp_path / "h"), *like]) == 0
    assert files(tmp_path / "h") == files(source.path)
    shard = ["--max-shard-gb", "0.000005"]
    assert main(["convert", "megatron-to-hf", str(tmp_path / "m"), str(tmp_path / "s"), *like, *shard]) == 0
    assert len(Checkpoint.open(tmp_path / "s").files) > 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("convert", "megatron-to-hf", "a", "b"), "needs --like DIR"),
        (("convert", "hf-to-megatron", "nowhere", "b"), "cannot read nowhere"),
    ],
)
def test_what_cannot_be_done_exits_with_2_and_a_reason(capsys, args, message):
    assert main(list(args)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("hf-to-megatron", "a", "b", "--like", "a"), "no use for --like, which megatron-to-hf has"),
        (("hf-to-megatron", "a", "b", "--max-shard-gb", "1"), "no use for --max-shard-gb"),
        (
            ("megatron-to-hf", "a", "b", "--like", "a", "--mtp-init", "copy", "--seed", "0"),
            "no use for --mtp-init, --seed, which",
        ),
        (("hf-to-megatron", "a", "b", "--mtp-init", "copy", "--mtp-std", "1"), "--mtp-std is for --mtp-init"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(capsys, args, message):
    assert main(["convert", *args]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "5GB", "1e-10"])
def test_a_size_that_is_none_is_refused(capsys, size):
    with pytest.raises(SystemExit) as status:
        main(["convert", "megatron-to-hf", "a", "b", "--like", "a", "--max-shard-gb", size])
    assert status.value.code == 2
    assert f"--max-shard-gb: '{size}' is no size" in capsys.readouterr().err


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("keep", [0, 0.1, 0.5, 0.99, "zeros", "noise"])
def test_a_damaged_file_is_named_and_nothing_is_written(make, tiny_config, tmp_path, file, keep):
    source = make(tiny_config())
    path = hf_to_megatron(source.path, tmp_path / "megatron") / file
    whole = path.read_bytes()
    noise = random.Random(0).randbytes(len(whole))
    damaged = {"zeros": bytes(len(whole)), "noise": noise}
    path.write_bytes(damaged[keep] if keep in damaged else whole[: int(len(whole) * keep)])
    with pytest.raises(CheckpointError, match=str(path.parent)):
        megatron_to_hf(path.parent, tmp_path / "out", like=source.path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["megatron", "source"]


def test_a_link_that_leads_to_itself_is_an_error_of_the_system(make, tiny_config, tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert main(["convert", "hf-to-megatron", str(make(tiny_config()).path), str(tmp_path / "loop")]) == 2
    assert "loop" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loop", "source"]


def test_a_direction_whose_arrow_the_shell_took_is_explained(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "hf-", "a", "b"])
    assert "a shell takes an unquoted > for a redirection" in capsys.readouterr().err


def test_neither_megatron_nor_transformers_nor_a_process_group_is_needed(make, tiny_config, tmp_path):
    source = make(tiny_config())
    code = (
        "import sys; blocked = ('megatron', 'transformers', 'tqdm', 'rich', 'ray')\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in blocked: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from relax_bridge.cli import main\n"
        f"a = main(['convert', 'hf-to-megatron', {str(source.path)!r}, {str(tmp_path / 'm')!r}])\n"
        f"b = main(['convert', 'megatron-to-hf', {str(tmp_path / 'm')!r}, {str(tmp_path / 'h')!r}, "
        f"'--like', {str(source.path)!r}])\n"
        f"c = main(['audit', {str(tmp_path / 'h')!r}, '--tensor', '2', '--json'])\n"
        "import torch.distributed as dist\n"
        "raise SystemExit(a or b or c or dist.is_initialized() or any(n in sys.modules for n in blocked))\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "h") == files(source.path)


def test_its_metadata_unpickles_without_megatron(make, tiny_config, tmp_path):
    there = hf_to_megatron(make(tiny_config()).path, tmp_path / "m")

    class Torch(pickle.Unpickler):
        def find_class(self, module, name):
            assert module.split(".")[0] in ("torch", "collections", "pathlib", "builtins", "_codecs"), module
            return super().find_class(module, name)

    with (there / ".metadata").open("rb") as file:
        Torch(file).load()
