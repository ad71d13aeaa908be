"""The objective of pairs against autograd through the whole formula."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from relax_core.algorithms import AlgorithmConfig, Sequences
from relax_core.data.problems import DataError
from relax_core.loop.local import LocalPolicy
from relax_core.loop.preferences import PreferenceObjective
from relax_core.loss import LossReducer
from relax_core.testing.runs import records, start
from relax_core.trainer.sample import Sample
from relax_kernels import LogProbs

COUNTS = (2, 3, 1, 4)
"""Targets of the members of two pairs."""


def test_loss_and_gradient_are_those_of_the_formula_in_one_part_or_many():
    generator = torch.Generator().manual_seed(3)
    logprobs = [torch.randn(n, generator=generator).double().requires_grad_() for n in COUNTS]
    refs = [torch.randn(n, generator=generator).double() for n in COUNTS]
    ratio = [(a - b).sum() for a, b in zip(logprobs, refs, strict=True)]
    wanted = -(F.logsigmoid(0.5 * (ratio[0] - ratio[1])) + F.logsigmoid(0.5 * (ratio[2] - ratio[3]))) / 2
    wanted.backward()
    gradients = [logprob.grad.clone() for logprob in logprobs]
    samples = [
        Sample(
            torch.arange(n + 1),
            torch.tensor([0.0] + [1.0] * n),
            place // 2,
            {"ref_logprob": torch.cat([torch.zeros(1), ref.float()])},
        )
        for place, (n, ref) in enumerate(zip(COUNTS, refs, strict=True))
    ]
    logprob_B = torch.cat([torch.cat([torch.zeros(1), x.detach().float()]) for x in logprobs])
    objective = PreferenceObjective(AlgorithmConfig(name="dpo", preference_beta=0.5))
    prepared = objective.prepare(samples, logprob_B)
    parts = {name: torch.split(x_B, [n + 1 for n in COUNTS]) for name, x_B in prepared.batch_columns.items()}
    reducer = LossReducer(prepared.denominators)
    total = 0.0
    for place in range(4):
        logprobs[place].grad = None
        columns = {name: part[place][1:].double() for name, part in parts.items()}
        index = torch.zeros(COUNTS[place], dtype=torch.int64)
        terms = objective.terms(LogProbs(logprobs[place], None), columns, Sequences(index, 1))
        loss, shares = reducer.reduce(terms.terms)
        loss.backward()
        total += float(loss)
        # Columns are float32.
        torch.testing.assert_close(logprobs[place].grad, gradients[place], rtol=1e-6, atol=1e-7)
        assert shares["preference_accuracy"] >= 0
    assert total == pytest.approx(wanted.item(), rel=1e-6)


def rows(path, *made):
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def test_the_first_loss_is_log_2_and_training_prefers_the_chosen(tmp_path, monkeypatch, run_quickstart):
    numbers = range(10, 26)
    pairs = [{"prompt": f"{n} + {n}", "chosen": str(2 * n), "rejected": str(2 * n + 1)} for n in numbers]
    settings = {
        "data.path": rows(tmp_path / "pairs.jsonl", *pairs), "data.eval_path": "null",
        "sft.samples_per_step": "8", "trainer.lr": "1e-4",
    }  # fmt: skip
    steps = run_quickstart("dpo", **settings)
    # Policy and reference are the same: every margin is 0.
    assert steps[0]["dpo_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert steps[0]["preference_margin"] == pytest.approx(0, abs=1e-6)
    assert steps[1]["dpo_loss"] < math.log(2)
    assert steps[1]["preference_accuracy"] > 0.5


def test_held_out_pairs_are_scored_a_batch_at_a_time(small_run, tmp_path, monkeypatch):
    """13 pairs in batches of 5, before and after one step; each pair counts the same."""
    scored = []
    score = LocalPolicy.score

    def watched(policy, samples, **options):
        found = score(policy, samples, **options)
        scored.append((options.get("of", "policy"), [float(one.double().sum()) for one in found]))
        return found

    monkeypatch.setattr(LocalPolicy, "score", watched)
    numbers = range(10, 60)
    pairs = [{"prompt": f"{n} + {n}", "chosen": str(2 * n), "rejected": str(2 * n + 1)} for n in numbers]
    data = {"path": rows(tmp_path / "pairs.jsonl", *pairs), "eval_path": None, "eval_fraction": 0.26}
    config = small_run(
        algorithm={"name": "dpo", "preference_beta": 0.5},
        data=data,
        run={"steps": 1},
        sft={"samples_per_step": 5},
    )
    before, after = (
        step for step in records(start(config, tmp_path / "run")) if step.get("eval_loss") is not None
    )
    # The step in the middle asks for the reference's scores alone.
    assert [(of, len(sums)) for of, sums in scored] == [
        *[("reference", 10), ("policy", 10)] * 2, ("reference", 6), ("policy", 6),
        ("reference", 10),
        *[("reference", 10), ("policy", 10)] * 2, ("reference", 6), ("policy", 6),
    ]  # fmt: skip
    losses, right = [], []
    for (_, theirs), (_, ours) in zip(scored[7::2], scored[8::2], strict=True):
        ratios = [a - b for a, b in zip(ours, theirs, strict=True)]
        margins = [0.5 * (better - worse) for better, worse in zip(ratios[::2], ratios[1::2], strict=True)]
        losses += [math.log(1 + math.exp(-margin)) for margin in margins]
        right += [margin > 0 for margin in margins]
    assert before["eval_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert after["eval_loss"] == pytest.approx(sum(losses) / 13, rel=1e-6)
    assert after["eval_accuracy"] == sum(right) / 13
    assert after["eval_loss"] != pytest.approx(math.log(2), rel=1e-4)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1 + 1", "chosen": "2", "rejected": "2"}, "chosen and rejected are the same"),
        ({"prompt": "1 + 1", "chosen": "2"}, "rejected must be text, or a list of one assistant message"),
        (
            {"prompt": "1 + 1", "chosen": [{"role": "user", "content": "2"}], "rejected": "3"},
            "chosen must be text, or a list of one assistant message",
        ),
    ],
)
def test_rows_that_are_no_pairs_are_refused(tmp_path, row, words, small_model):
    from relax_core.data import load_pairs, load_tokenizer
    from relax_core.data.config import DataConfig

    config = DataConfig(path=rows(tmp_path / "pairs.jsonl", row))
    with pytest.raises(DataError, match=words):
        load_pairs(config, load_tokenizer(small_model), seed=0)


def test_completions_may_be_messages(tmp_path, small_model):
    from relax_core.data import load_pairs, load_tokenizer
    from relax_core.data.config import DataConfig

    path = rows(
        tmp_path / "pairs.jsonl",
        {"prompt": "1 + 1", "chosen": [{"role": "assistant", "content": "2"}], "rejected": "3"},
    )
    tokenizer = load_tokenizer(small_model)
    (pair,) = load_pairs(DataConfig(path=path), tokenizer, seed=0).train
    learned = [tokenizer.decode(one.ids[one.loss_mask].tolist()) for one in (pair.chosen, pair.rejected)]
    assert ["2" in learned[0], "3" in learned[1]] == [True, True]
    assert (
        pair.chosen.ids[~pair.chosen.loss_mask].tolist()
        == pair.rejected.ids[~pair.rejected.loss_mask].tolist()
    )
