"""What a newcomer's first command promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import relax_core
import torch
import torch.nn.functional as F
from relax_core.config import load_config
from relax_core.loop.session import open_session
from relax_core.trainer.sample import Sample
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path(relax_core.__file__).parent / "assets" / "quickstart"


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
    """The trainer scores packed held-out answers; transformers scores them one by one from the export."""
    rows = [json.loads(line) for line in (ASSETS / "held_out.jsonl").read_text().splitlines()[:30]]
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    samples = []
    for row in rows:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
        tokens_L = torch.tensor(tokenizer.apply_chat_template(turns)["input_ids"])
        mask_L = (torch.arange(len(tokens_L)) >= len(prompt)).float()
        samples.append(Sample(tokens_L, mask_L))
    with open_session(load_config("quickstart", ["--model.path", str(run / "hf")])) as session:
        scores = session.trainer.score(samples)

    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    for sample, score in zip(samples, scores, strict=True):
        with torch.no_grad():
            logprobs_LV = F.log_softmax(model(sample.tokens_L[None]).logits[0], dim=-1)
        expected = logprobs_LV[:-1].gather(1, sample.tokens_L[1:, None]).squeeze(1) * sample.mask_L[1:]
        assert (score[1:] - expected).abs().max() < 1e-5
