"""Runs of the command on the quickstart that take a second."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_core.cli.train import main

_SMALL = {
    "run.steps": "2", "run.name": "tiny", "run.progress": "none", "run.threads": "1",
    "rollout.prompts_per_step": "4", "rollout.samples_per_prompt": "4", "rollout.max_new_tokens": "4",
    "eval.before": "false", "eval.after": "false", "eval.every": "0", "checkpoint.every": "0",
    "trainer.warmup_steps": "0", "reward.concurrency": "1",
}  # fmt: skip


@pytest.fixture
def run_quickstart(tmp_path, monkeypatch) -> Callable[..., list[dict[str, Any]]]:
    """Runs `relax-train --algorithm.name NAME` for two steps in `tmp_path`; the metrics of each step."""

    def run(name: str, **more: str) -> list[dict[str, Any]]:
        monkeypatch.chdir(tmp_path)
        settings = {**_SMALL, "algorithm.name": name, **more}
        assert main([word for key, value in settings.items() for word in (f"--{key}", value)]) == 0
        return [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]

    return run
