"""A run with adapters, from the config to what other tools read of it."""

import json
import subprocess
import sys

import peft
import pytest
import torch
from megatron.core import dist_checkpointing
from relax_bridge import Checkpoint, model_map, write_checkpoint
from relax_core.config import load_config
from relax_core.loop import run
from relax_core.model.lora_config import LINEAR
from relax_core.run import RunDirectory
from relax_core.testing.runs import records, start, weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

LORA = {
    "lora": {"rank": 4, "alpha": 8.0},
    "algorithm": {"kl_loss_coef": 0.1},
    "trainer": {"lr": 2e-2, "precision": "fp32"},
}
TOKENS = torch.arange(3, 30)[None]


@pytest.fixture
def finished(small_run, tmp_path):
    return start(small_run(**LORA), tmp_path / "finished")


@torch.no_grad()
def logits(model):
    return model.eval()(TOKENS).logits


def test_the_engine_gets_merged_weights_and_the_reference_is_the_start(finished, small_model):
    steps = records(finished)[1:]
    # The engine's log-probs are those of merged weights: B (A x) against (B A) x in float32.
    assert all(step["logprob_gap_max"] < 1e-4 for step in steps)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert steps[-1]["kl"] > 1e-6
    before, after = weights(small_model), weights(finished.hf)
    changed = {name.rsplit(".", 2)[-2] for name in before if not torch.equal(before[name], after[name])}
    mixers = {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj"}
    projections = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
    assert changed == mixers | projections | {"gate_proj", "up_proj", "down_proj"}


def test_checkpoints_hold_adapters_and_a_resumed_run_equals_the_uninterrupted_one(
    finished, small_run, tmp_path
):
    stored = dist_checkpointing.load_tensors_metadata(str(finished.checkpoints / "step_2"))
    assert len(stored) > 0
    assert all("lora_" in name for name in stored)
    config = small_run(**LORA)
    half = tmp_path / "half"
    with RunDirectory.create(half, config) as directory:
        short = config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})})
        run(short, directory, resume=False)
    with RunDirectory.resume(half) as directory:
        directory.reopen(config)
        assert run(config, directory, resume=True) == "finished"
    assert records(directory)[3:] == records(finished)[3:]
    first, second = weights(finished.hf), weights(directory.hf)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_peft_loads_the_adapter_and_gives_the_merged_models_logits(finished, small_model):
    base = AutoModelForCausalLM.from_pretrained(small_model, dtype="float32")
    start = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, finished.hf.with_name("adapter")))
    merged = logits(AutoModelForCausalLM.from_pretrained(finished.hf, dtype="float32"))
    assert (merged - start).abs().max() > 1e-2
    # float32: B (A x) against (B A) x.
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-5)


# A process that knows nothing of Relax: how far merged weights are from the base, and from the adapter on it.
FRESH = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

base, merged, adapter = sys.argv[1:]
tokens = torch.arange(3, 30)[None]
with torch.no_grad():
    wanted = AutoModelForCausalLM.from_pretrained(merged, dtype="float32").eval()(tokens).logits
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32").eval()
    start = model(tokens).logits
    adapted = PeftModel.from_pretrained(model, adapter).eval()(tokens).logits
assert not any(name.startswith("relax") for name in sys.modules)
print(json.dumps([float((wanted - other).abs().max()) for other in (start, adapted)]))
"""


def test_peft_loads_the_adapters_of_every_projection_and_of_routed_experts(
    small_run, small_model, moe_config_of, tmp_path
):
    dense = Checkpoint.open(small_model)
    facts = moe_config_of(
        architectures=["Qwen3_5MoeForCausalLM"],
        vocab_size=dense.config["vocab_size"],
        eos_token_id=2,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in small_model.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            (bare / file.name).write_bytes(file.read_bytes())
    (bare / "config.json").write_text(json.dumps(facts))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 0.3)
        for name, shape in model_map(facts).hf_shapes().items()
    }
    moe = write_checkpoint(tmp_path / "moe", tensors, like=Checkpoint.open(bare, weights=False))
    sections = {
        **LORA,
        "lora": {"rank": 2, "alpha": 8.0, "targets": (*LINEAR, "experts")},
        "model": {"path": str(moe)},
        "run": {"steps": 2, "device": "cpu", "progress": "none", "threads": 1, "seed": 3, "name": "moe"},
    }
    directory = start(small_run(**sections), tmp_path / "run")
    paths = (moe, directory.hf, directory.hf.with_name("adapter"))
    fresh = subprocess.run(
        [sys.executable, "-c", FRESH, *map(str, paths)], stdout=subprocess.PIPE, check=True, text=True
    )
    moved, difference = json.loads(fresh.stdout.splitlines()[-1])
    assert moved > 0.1
    # float32, as above: logits of a few units.
    assert difference < 1e-4
    changed = {
        name.rsplit(".experts.", 1)[1]
        for name, tensor in weights(moe).items()
        if ".experts." in name and not torch.equal(tensor, weights(directory.hf)[name])
    }
    assert any("down_proj" in name for name in changed)


@pytest.mark.parametrize("alone", [False, True])
def test_draft_layers_adapters_are_trained_and_lie_in_a_file_of_their_own(
    small_run, small_model, tmp_path, alone
):
    sections = {
        **LORA,
        "lora": {"rank": 2, "alpha": 8.0, "drafts": True},
        "mtp": {"loss_coefficient": 0.5, "only": alone},
        "run": {"steps": 2, "device": "cpu", "progress": "none", "threads": 1, "seed": 3, "name": "drafts"},
    }
    finished = start(small_run(**sections), tmp_path / "drafts")
    before, after = weights(small_model), weights(finished.hf)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    drafts = {name for name in changed if name.startswith("mtp.")}
    assert {name.rsplit(".", 2)[-2] for name in drafts} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert (changed == drafts) == alone
    adapter = finished.hf.with_name("adapter")
    stored = load_file(adapter / "draft_adapter.safetensors")
    name = "mtp.layers.0.mlp.down_proj"
    a, b = (stored[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
    torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] + 4.0 * b @ a)
    assert not any(".mtp." in other for other in load_file(adapter / "adapter_model.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(small_model, dtype="float32")
    adapted = logits(peft.PeftModel.from_pretrained(base, adapter))
    merged = logits(AutoModelForCausalLM.from_pretrained(finished.hf, dtype="float32"))
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model.random_weights": "true"}, "adapters adapt a checkpoint"),
        ({"mtp.only": "true"}, "with adapters nothing else is trained, and the draft layers have none"),
        (
            {"lora.drafts": "true", "mtp.loss_coefficient": "0"},
            "nothing would train the draft layers' adapters",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused(flags, words):
    flags = {"lora.rank": "4", **flags}
    with pytest.raises(ValueError, match=words):
        load_config("quickstart", [word for name, value in flags.items() for word in (f"--{name}", value)])
