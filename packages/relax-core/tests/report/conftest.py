"""Made-up runs whose curves and completions a test can count on."""

import json
from pathlib import Path

import pytest

HOSTILE = (
    "</script ><script>window.hacked = 1</script><!--<script>"
    "<img src=x onerror='window.hacked = 2'><b>bold</b> &lt;"
)


def write_lines(path: Path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def make_run(tmp_path):
    """Writes a run: reward n / 20, entropy 2 - n / 20; each step has one right and one wrong sample."""

    def make(name: str, *, shift: float = 0.0, steps: int = 20, deep: bool = False, **config) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        metrics = [{"step": 0, "eval_accuracy": 0.25, "time": {"phases": {"eval": 1.0}, "total": 1.0}}]
        samples = []
        for step in range(1, steps + 1):
            phases = {"rollout": 2.0, "reward": 0.5, "train": 3.0}
            metrics.append(
                {
                    "step": step,
                    "reward": step / 20 + shift,
                    "entropy": "NaN" if step == 10 else 2 - step / 20,
                    "logprob_gap_mean": 1e-6,
                    "logprob_gap_max": 1e-5,
                    "response_length_mean": 5.0,
                    "mtp_loss": 2.0,
                    "mtp_acceptance": 0.5,
                    **({"mtp_acceptance_0": 0.75, "mtp_acceptance_1": 0.5} if deep else {}),
                    "grad_norm": 1.0,
                    "lr": 1e-4,
                    "loss": 0.1,
                    "time": {"phases": phases, "total": 6.0, "elapsed": 6.0 * step},
                }
            )
            for reward in (1.0, 0.0):
                samples.append(
                    {
                        "step": step,
                        "prompt": f"{step} plus {step}?",
                        "completion": f"is {2 * step}" if reward else f"maybe {2 * step + 1}",
                        "reward": reward,
                        "advantage": reward - 0.5,
                    }
                )
        samples[0]["completion"] = HOSTILE
        samples[1]["completion"] = "a long thought\n" * 30
        write_lines(folder / "metrics.jsonl", metrics)
        write_lines(folder / "samples.jsonl", samples)
        (folder / "config.yaml").write_text(
            f"run:\n  steps: {steps}\n  seed: {config.get('seed', 0)}\ndata:\n  path: rows.jsonl\n"
        )
        (folder / "summary.json").write_text(
            json.dumps({"eval_before": 0.25, "eval_after": 0.75, "steps": steps, "wall_s": 125.0, "seed": 0})
        )
        return folder

    return make
