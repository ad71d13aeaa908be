"""What a newcomer's first command promises."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    command = [sys.executable, "-m", "relax_core.cli.train", "--run.name", "first"]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "held-out" in done.stderr
    assert "Warning" not in done.stderr
    return folder / "runs" / "first"


def test_the_model_gets_better_at_its_task(run):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_after"] >= summary["eval_before"] + 0.25
    assert summary["reward_last"] > summary["reward_first"]
    assert summary["peak_rss_gib"] <= 4
    assert summary["logprob_gap_max"] < 1e-4
    expected = {"steps", "wall_s", "train_tokens_per_s", "rollout_tokens_per_s", "seed", "versions"}
    assert expected <= summary.keys()


def test_everything_of_the_run_directory_is_there(run):
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "log.txt"} <= names
    assert {"tensorboard", "checkpoints", "hf", "report.html"} <= names
    assert any((run / "tensorboard").iterdir())


def test_the_exported_model_gives_the_trainers_log_probs_in_transformers(run):
    """Samples of the last step were drawn before its update, so the model is asked for new ones."""
    from relax_bridge import Checkpoint, model_map
    from relax_core.device import initialise, shutdown
    from relax_core.model import Qwen35Config, build_model
    from relax_core.packing import PackedLayout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    tokens_T = torch.tensor(tokenizer("forty seven + 48<|im_end|>")["input_ids"])
    with torch.no_grad():
        expected = F.log_softmax(model(tokens_T[None]).logits[0].float(), dim=-1)
    source = Checkpoint.open(run / "hf")
    initialise("cpu")
    try:
        trainer = build_model(Qwen35Config.from_hf(source.config), random_weights=False)
        parameters = dict(trainer.named_parameters())
        with torch.no_grad():
            for name, tensor in model_map(source.config).import_tensors(source):
                parameters[name].copy_(tensor)
            hidden_TD = trainer(tokens_T, PackedLayout.build([len(tokens_T)]))
            got = F.log_softmax(trainer.logits(hidden_TD), dim=-1)
    finally:
        shutdown()
    assert math.isclose(float((got - expected).abs().max()), 0, abs_tol=1e-5)
