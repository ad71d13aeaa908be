"""Supervised fine-tuning and continued pre-training, from rows to an exported model."""

import json
import math

import pytest
import torch
from relax_core.loop import run
from relax_core.loop.local import LocalPolicy
from relax_core.run import RunDirectory
from relax_core.testing.runs import records, start, weights
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_supervised_fine_tuning_lowers_the_held_out_loss(small_run, tmp_path, monkeypatch):
    scored = []
    score = LocalPolicy.score
    monkeypatch.setattr(
        LocalPolicy, "score", lambda policy, samples: scored.append(len(samples)) or score(policy, samples)
    )
    rows = [{"prompt": f"{i} plus {i}", "completion": str(2 * i)} for i in range(10, 60)]
    data = tmp_path / "sft.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small_run(
        algorithm={"name": "sft"},
        data={"path": str(data), "eval_path": None, "eval_fraction": 0.26},
        run={"steps": 20},
        sft={"samples_per_step": 10},
    )
    steps = records(start(config, tmp_path / "sft"))
    assert steps[-1]["eval_loss"] < 0.8 * steps[0]["eval_loss"]
    assert scored == [10, 3] * 2, "before and after, no more at once than a step has"
    assert steps[-1]["eval_perplexity"] == pytest.approx(math.exp(steps[-1]["eval_loss"]))


def test_continued_pre_training_lowers_the_perplexity_of_held_out_documents(small_run, tmp_path):
    rows = [{"text": f"{i} plus {i} = {2 * i}"} for i in range(10, 60)]
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small_run(
        algorithm={"name": "sft"},
        data={
            "path": str(data),
            "eval_path": None,
            "eval_fraction": 0.2,
            "text_key": "text",
            "block_tokens": 24,
        },
        run={"steps": 12},
        sft={"samples_per_step": 6},
    )
    directory = start(config, tmp_path / "documents")
    steps = records(directory)
    assert steps[-1]["eval_perplexity"] < 0.6 * steps[0]["eval_perplexity"]
    # The perplexity is that of transformers on the same text, document by document.
    apart = small_run(
        algorithm={"name": "sft"},
        model={"path": str(directory.hf)},
        data={
            "path": str(data),
            "eval_path": str(data),
            "text_key": "text",
            "documents": "apart",
            "block_tokens": 512,
        },
        run={"steps": 1},
        sft={"samples_per_step": 6},
    )
    ours = records(start(apart, tmp_path / "apart"))[0]["eval_perplexity"]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(directory.hf),
        AutoTokenizer.from_pretrained(directory.hf),
    )
    loss = count = 0.0
    for row in rows:
        ids = [tokenizer.eos_token_id, *tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
        loss += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    # float32 here, float64 of float32 logits there.
    assert ours == pytest.approx(math.exp(loss / count), rel=1e-5)


def test_a_resumed_run_with_workers_and_batches_ahead_equals_one_that_makes_each_when_it_is_due(
    small_run, tmp_path
):
    """In the middle of a mixture, whose second source is drawn twice as often."""
    data, other = tmp_path / "sft.jsonl", tmp_path / "other.jsonl"
    for file, first in ((data, 10), (other, 40)):
        rows = [{"prompt": f"{i} plus {i}", "completion": str(2 * i)} for i in range(first, first + 13)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(ahead, steps=4, workers=0):
        return small_run(
            algorithm={"name": "sft"},
            data={
                "path": str(data),
                "mixture": {str(other): 2.0},
                "eval_path": None,
                "eval_fraction": 0.2,
                "batches_ahead": ahead,
                "workers": workers,
            },
            run={"steps": steps, "name": "half"},
            sft={"samples_per_step": 4},
        )

    plain = start(config(0), tmp_path / "plain")
    with RunDirectory.create(tmp_path / "half", config(3)) as directory:
        run(config(3, steps=2), directory, resume=False)
    with RunDirectory.resume(tmp_path / "half") as directory:
        directory.reopen(config(3, workers=1))
        assert run(config(3, workers=1), directory, resume=True) == "finished"
    assert records(directory)[3:] == records(plain)[3:]
    first, second = weights(plain.hf), weights(directory.hf)
    assert all(torch.equal(first[name], second[name]) for name in first)
