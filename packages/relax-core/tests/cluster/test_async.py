"""Sampling while the trainer trains."""

import json

import pytest
from relax_core.loop import run
from relax_core.loop.learning import Learner
from relax_core.run import RunDirectory


@pytest.fixture
def trained_prompts(monkeypatch):
    """Ids of the prompts trained on, in order."""
    seen = []
    before = Learner.samples

    def samples(learner, groups):
        seen.extend(group.prompt.id for group in groups)
        return before(learner, groups)

    monkeypatch.setattr(Learner, "samples", samples)
    return seen


@pytest.mark.parametrize("placement", ["async", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_every_prompt_is_trained_once_in_order_at_most_so_old_though_an_engine_and_a_rank_are_killed(
    small_run, tmp_path, trained_prompts, killing, placement
):
    config = small_run(
        run={"steps": 5, "name": placement},
        cluster={"mode": "ray", "placement": placement, "engines": 2, "max_staleness": 2},
        trainer={"lr": 1e-4},
        rollout={"max_new_tokens": 24},
        eval={"before": False, "after": False},
    )
    killed = killing({2: ("engine", 0, 0.01), 3: ("rank", 0)})
    with RunDirectory.create(tmp_path / placement, config) as directory:
        assert run(config, directory, resume=False) == "finished"
    assert len(killed) == 2
    stream_order = _expected(config, 5 * 4)
    assert trained_prompts == stream_order
    steps = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert steps[0]["staleness_max"] == 0
    assert max(step["staleness_max"] for step in steps) in (1, 2)
    # The gap is measured still; weights that move by 1e-4 a step change log-probs by less than this.
    assert all(0 <= step["logprob_gap_mean"] < 0.05 for step in steps)


def _expected(config, count):
    from relax_core.data import load_prompts, load_tokenizer

    data = load_prompts(config.data, load_tokenizer(config.model.path), seed=config.run.seed)
    return [prompt.id for prompt in data.stream().take(count)]
