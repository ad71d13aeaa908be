"""A newcomer's first run: the one command learns, shows how, and leaves a model that transformers loads."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import relax_core
import torch
import torch.nn.functional as F
from relax_core.config import load_config
from relax_core.loop.session import open_session
from relax_core.trainer.sample import Sample
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path(relax_core.__file__).parent / "assets" / "quickstart"


@dataclass(frozen=True)
class FirstRun:
    """What `relax-train` without an argument left: its directory, and what the terminal showed."""

    path: Path
    terminal: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    folder = tmp_path_factory.mktemp("newcomer")
    command = str(Path(sys.executable).with_name("relax-train"))
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [command], cwd=folder, env=offline, check=False, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (folder / "runs").iterdir()
    return FirstRun(path, done.stdout + done.stderr)


def test_the_model_gets_better_at_its_task(first_run: FirstRun) -> None:
    summary = first_run.summary
    assert summary["eval_metric"] == "accuracy"
    assert summary["eval_after"] >= summary["eval_before"] + 0.25
    assert summary["reward_last"] > summary["reward_first"]


def test_it_stays_small_and_samples_from_the_trainers_own_distribution(first_run: FirstRun) -> None:
    assert first_run.summary["peak_rss_gib"] <= 4
    assert first_run.summary["logprob_gap_max"] < 1e-4
    named = {"steps", "wall_s", "train_tokens_per_s", "rollout_tokens_per_s", "seed", "versions"}
    assert named <= first_run.summary.keys()


def test_the_terminal_shows_progress_and_nothing_that_worries(first_run: FirstRun) -> None:
    assert first_run.path.name in first_run.terminal
    assert "held-out" in first_run.terminal
    assert "report.html" in first_run.terminal.splitlines()[-1]
    for word in ("warning", "traceback", "error", "deprecat"):
        assert word not in first_run.terminal.lower()


def test_every_step_is_recorded_once_and_in_order(first_run: FirstRun) -> None:
    assert [record["step"] for record in first_run.steps] == list(range(first_run.summary["steps"] + 1))
    assert all("time" in record for record in first_run.steps)


def test_everything_of_the_run_directory_is_there(first_run: FirstRun) -> None:
    names = {path.name for path in first_run.path.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "log.txt"} <= names
    assert {"tensorboard", "checkpoints", "hf", "report.html"} <= names
    assert any((first_run.path / "tensorboard").iterdir())
    page = (first_run.path / "report.html").read_text()
    assert "<!doctype html>" in page
    assert 'src="http' not in page, "it opens offline"


def test_the_exported_model_gives_the_trainers_log_probs_in_transformers(first_run: FirstRun) -> None:
    """The trainer scores packed held-out answers; transformers scores them one by one from the export."""
    rows = [json.loads(line) for line in (ASSETS / "held_out.jsonl").read_text().splitlines()[:30]]
    tokenizer = AutoTokenizer.from_pretrained(first_run.path / "hf")
    samples = []
    for row in rows:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
        tokens_L = torch.tensor(tokenizer.apply_chat_template(turns)["input_ids"])
        mask_L = (torch.arange(len(tokens_L)) >= len(prompt)).float()
        samples.append(Sample(tokens_L, mask_L))
    with open_session(load_config("quickstart", ["--model.path", str(first_run.path / "hf")])) as session:
        scores = session.policy.trainer.score(samples)

    model = AutoModelForCausalLM.from_pretrained(first_run.path / "hf")
    for sample, score in zip(samples, scores, strict=True):
        with torch.no_grad():
            logprobs_LV = F.log_softmax(model(sample.tokens_L[None]).logits[0], dim=-1)
        expected = logprobs_LV[:-1].gather(1, sample.tokens_L[1:, None]).squeeze(1) * sample.mask_L[1:]
        assert (score[1:] - expected).abs().max() < 1e-5
