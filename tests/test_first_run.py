"""A newcomer's first run: the one command learns, its report opens, its model loads in transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def run(command: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(BIN / command), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of `relax-train` without an argument."""
    folder = tmp_path_factory.mktemp("newcomer")
    run("relax-train", cwd=folder)
    (made,) = (folder / "runs").iterdir()
    return made


@pytest.mark.slow
def test_it_gets_better_at_the_held_out_task(first_run: Path) -> None:
    summary = json.loads((first_run / "summary.json").read_text())
    assert summary["eval_after"] - summary["eval_before"] >= 0.25
    assert summary["reward_last"] > summary["reward_first"]


@pytest.mark.slow
def test_it_stays_small(first_run: Path) -> None:
    assert json.loads((first_run / "summary.json").read_text())["peak_rss_gib"] <= 4.0


@pytest.mark.slow
def test_every_step_is_recorded_once_and_in_order(first_run: Path) -> None:
    records = [json.loads(line) for line in (first_run / "metrics.jsonl").read_text().splitlines()]
    steps = json.loads((first_run / "summary.json").read_text())["steps"]
    assert [record["step"] for record in records] == list(range(steps + 1))


@pytest.mark.slow
def test_the_report_is_one_page_that_opens_offline(first_run: Path) -> None:
    run("relax-report", str(first_run), cwd=first_run.parent)
    page = (first_run / "report.html").read_text()
    assert "<html" in page
    assert 'src="http' not in page
    assert 'href="http' not in page


LOAD = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("12+34=", return_tensors="pt").input_ids
with torch.no_grad():
    logits = model(ids).logits
assert torch.isfinite(logits).all()
assert logits.shape[:2] == ids.shape
"""


@pytest.mark.slow
def test_the_trained_model_loads_in_transformers(first_run: Path) -> None:
    run("python", "-c", LOAD, str(first_run / "hf"), cwd=first_run)
