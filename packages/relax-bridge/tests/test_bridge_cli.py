"""The command, as a user types it."""

import json
import subprocess
import sys

import pytest
import torch
from relax_bridge import Checkpoint, model_map, write_checkpoint
from relax_bridge.cli import main


def run(capsys, *args):
    status = main([str(arg) for arg in args])
    out = capsys.readouterr()
    return status, out.out, out.err


def variant(source, path, edit):
    tensors = {name: source.tensor(name).clone() for name in source.names}
    edit(tensors)
    return write_checkpoint(path, tensors, like=source)


def test_audit_lists_every_tensor_under_both_names(tiny, capsys):
    status, out, _ = run(capsys, "audit", tiny.path)
    assert status == 0
    assert "whole: every tensor is covered exactly once" in out
    names = {word for line in out.splitlines() for word in line.split()}
    assert set(tiny.names) <= names
    assert set(model_map(tiny.config).megatron_shapes()) <= names
    assert "0: q, k, v, z, b, a" in out
    assert "MTP layers: 1 by config, 1 by name" in out


def test_audit_json_counts_by_hand_countable_totals(tiny, capsys):
    status, out, _ = run(capsys, "audit", tiny.path, "--json")
    found = json.loads(out)
    assert (status, found["whole"]) == (0, True)
    # 3 outside layers, 2 norms and 3 MLP tensors in each of 4 layers, 9 delta-net tensors in 2, 6 attention
    # tensors in 2, and 4 + 2 + 6 + 3 of the MTP layer.
    assert found["totals"]["hf_tensors"] == 3 + 4 * 5 + 2 * 9 + 2 * 6 + 15
    assert found["totals"]["megatron_tensors"] == 3 + 4 * 4 + 2 * 6 + 2 * 4 + 12
    assert found["totals"]["parameters"] == sum(tiny.tensor(name).numel() for name in tiny.names)
    in_proj = next(
        t for t in found["tensors"] if t["megatron"].endswith("layers.0.self_attention.in_proj.weight")
    )
    assert (in_proj["transform"], in_proj["shape"], len(in_proj["hf"])) == ("concat", [72, 16], 4)


def test_audit_names_the_owners_of_every_tensor(make, moe_config, capsys):
    source = make(moe_config(num_experts=4, shared_expert_intermediate_size=12))
    layout = ("--tensor", "2", "--pipeline", "2", "--expert", "2", "--expert-tensor", "1")
    found = json.loads(run(capsys, "audit", source.path, "--json", *layout)[1])
    owners = {t["megatron"]: {o["rank"]: o for o in t["owners"]} for t in found["tensors"]}
    assert set(owners["embedding.word_embeddings.weight"]) == {0, 1, 2, 3}, "MTP reads it on the last stage"
    assert set(owners["decoder.layers.0.mlp.experts.linear_fc1.weight3"]) == {1}
    assert set(owners["mtp.layers.0.eh_proj.weight"]) == {2, 3}
    moved = owners["decoder.layers.3.mlp.experts.linear_fc1.weight2"][3]
    assert moved["name"] == "decoder.layers.1.mlp.experts.linear_fc1.weight0"
    assert owners["decoder.layers.1.self_attention.linear_proj.weight"][0]["shape"] == [16, 16]
    text = run(capsys, "audit", source.path, *layout)[1]
    assert next(line for line in text.splitlines() if line.startswith("embedding.")).endswith("0-3")


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(tiny, capsys, monkeypatch):
    assert run(capsys, "audit", tiny.path)[2] == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    drawn = run(capsys, "audit", tiny.path)[2]
    assert drawn.startswith("\raudit [")
    assert "100%" in drawn
    assert drawn.endswith("GB/s\n")


def test_one_flipped_element_changes_exactly_one_digest_and_diff_names_it(tiny, tmp_path, capsys):
    def flip(tensors):
        tensors["mtp.fc.weight"][3, 5] += 1

    out = variant(tiny, tmp_path / "b", flip)
    digests = []
    for path in (tiny.path, out):
        found = json.loads(run(capsys, "audit", path, "--json")[1])
        digests.append({part["name"]: part["digest"] for t in found["tensors"] for part in t["hf"]})
    assert [n for n in digests[0] if digests[0][n] != digests[1][n]] == ["mtp.fc.weight"]
    status, text, _ = run(capsys, "diff", tiny.path, out)
    assert status == 1
    assert "mtp.fc.weight  values  1 of 512 elements" in text
    assert "tensors that differ: 1" in text


def test_swapped_halves_of_mtp_fc_are_named(tiny, tmp_path, capsys):
    def swap(tensors):
        tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].roll(16, dims=1)

    status, out, _ = run(capsys, "diff", tiny.path, variant(tiny, tmp_path / "b", swap), "--json")
    assert status == 1
    assert [one["name"] for one in json.loads(out)["differences"]] == ["mtp.fc.weight"]


def test_scrambled_rows_of_in_proj_are_named(tiny, tmp_path, capsys):
    the_map = model_map(tiny.config)
    there = dict(the_map.import_tensors(tiny))
    name = "decoder.layers.0.self_attention.in_proj.weight"
    entry = next(entry for entry in the_map.entries if entry.megatron == name)
    # What an exporter does that joins whole shards of two ranks instead of gathering per component.
    there[name] = torch.cat([entry.partition.shard(there[name], rank, 2) for rank in range(2)])
    out = write_checkpoint(tmp_path / "b", the_map.export_tensors(there), like=tiny)
    found = json.loads(run(capsys, "diff", tiny.path, out, "--json")[1])
    at = "model.layers.0.linear_attn.in_proj_"
    assert {one["name"] for one in found["differences"]} == {
        f"{at}{part}.weight" for part in ("qkv", "z", "b", "a")
    }


def test_a_dropped_expert_is_named(make, moe_config, capsys):
    gone = "mtp.layers.0.mlp.experts.1.up_proj.weight"
    source = make(moe_config(), edit=lambda tensors: tensors.pop(gone))
    status, out, _ = run(capsys, "audit", source.path)
    assert status == 1
    assert f"1 missing:\n  {gone}" in out


def test_diff_tells_shapes_dtypes_and_names_apart(make, tiny_config, capsys):
    def change(tensors):
        tensors["model.norm.weight"] = torch.ones(3)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
        tensors["extra"] = tensors.pop("mtp.norm.weight")

    a, b = make(tiny_config(), name="a"), make(tiny_config(), name="b", edit=change)
    _, out, _ = run(capsys, "diff", a.path, b.path, "--json")
    found = {one["name"]: one for one in json.loads(out)["differences"]}
    kinds = {name: one["kind"] for name, one in found.items()}
    assert kinds == {
        "model.norm.weight": "shape",
        "lm_head.weight": "dtype",
        "extra": "only in B",
        "mtp.norm.weight": "only in A",
    }
    assert found["lm_head.weight"]["elements"] == 0


def test_equal_bytes_of_another_dtype_are_not_equal(make, tiny_config, capsys):
    def zeros(dtype):
        return lambda tensors: tensors.update({"model.norm.weight": torch.zeros(16, dtype=dtype)})

    a = make(tiny_config(), name="a", edit=zeros(torch.bfloat16))
    b = make(tiny_config(), name="b", edit=zeros(torch.float16))
    status, out, _ = run(capsys, "diff", a.path, b.path)
    assert (status, "BF16 and F16; values differ in 0 of 16" in out) == (1, True)


def test_equal_checkpoints_are_equal_even_with_nan(make, tiny_config, capsys):
    def spoil(tensors):
        tensors["model.norm.weight"][0] = float("nan")

    a, b = (make(tiny_config(), name=name, edit=spoil) for name in "ab")
    status, out, _ = run(capsys, "diff", a.path, b.path)
    assert (status, out) == (0, "equal, bit for bit\n")


def test_only_changed_elements_count_infinite_or_not(make, tiny_config, capsys, monkeypatch):
    def change(norm, head):
        def edit(tensors):
            tensors["model.norm.weight"][:5] = torch.tensor(norm)
            tensors["lm_head.weight"].view(-1)[[0, 799]] = torch.tensor(head, dtype=torch.bfloat16)

        return edit

    inf, nan = float("inf"), float("nan")
    a = make(tiny_config(), name="a", edit=change([inf, nan, 0.0, 1.0, 2.0], [1.0, 2.0]))
    b = make(tiny_config(), name="b", edit=change([inf, nan, -0.0, 1.5, 2.0], [4.0, nan]))
    monkeypatch.setattr("relax_bridge.diff._CHUNK", 7)
    _, out, _ = run(capsys, "diff", a.path, b.path, "--json")
    assert "NaN" not in out, "no JSON"
    found = {one["name"]: (one["elements"], one["max_abs"]) for one in json.loads(out)["differences"]}
    assert found == {"model.norm.weight": (2, 0.5), "lm_head.weight": (2, None)}
    assert (
        "lm_head.weight     values  2 of 800 elements, at most nan" in run(capsys, "diff", a.path, b.path)[1]
    )


def test_complex_and_integer_tensors_are_compared_as_such(make, tiny_config, capsys):
    def add(z, n):
        return lambda tensors: tensors.update(
            z=torch.tensor([z, 1j]), n=torch.tensor([n, n], dtype=torch.int8)
        )

    a, b = (make(tiny_config(), name=name, edit=add(z, n)) for name, z, n in (("a", 3j, 5), ("b", -1j, -5)))
    found = json.loads(run(capsys, "diff", a.path, b.path, "--json")[1])["differences"]
    assert {one["name"]: (one["elements"], one["max_abs"]) for one in found} == {
        "n": (2, 10.0),
        "z": (1, 4.0),
    }


def test_map_prints_the_table_of_a_name_a_file_and_a_directory(tiny, capsys):
    status, out, _ = run(capsys, "map", "Qwen3.5-9B")
    assert status == 0
    assert "10240x4096" in out, "linear_qkv of 9B has 10240 rows"
    assert "i = 3, 7, 11, 15, 19, 23, 27, 31" in out
    for where in (tiny.path, tiny.path / "config.json"):
        table = json.loads(run(capsys, "map", where, "--json")[1])
        assert table["mtp_layers"] == 1
        assert {"mtp.fc.weight"} in [set(row["hf"]) for row in table["rows"]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("map", "Qwen9"), "Qwen9 is no directory, no file, and none of Qwen3.5-0.8B"),
        (("audit", "nowhere"), "cannot read nowhere/config.json"),
        (("diff", "nowhere", "nowhere"), "cannot read nowhere/config.json"),
    ],
)
def test_what_cannot_be_told_exits_with_2_and_a_reason(capsys, args, message):
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "")
    assert message in err


def test_the_reader_of_a_pipe_may_leave(tiny):
    command = f"{sys.executable} -c 'from relax_bridge.cli import main; raise SystemExit(main())'"
    done = subprocess.run(
        f"{command} map Qwen3.5-397B-A17B --json | head -c 10",
        shell=True,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""


def test_audit_without_digests_does_not_read_tensors(tiny, capsys, monkeypatch):
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: pytest.fail("read"))
    status, out, _ = run(capsys, "audit", tiny.path, "--no-digest", "--json")
    assert status == 0
    assert json.loads(out)["tensors"][0]["hf"][0]["digest"] is None
