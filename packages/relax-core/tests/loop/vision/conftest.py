"""A tiny model that sees, and runs of it on pictures of one colour."""

import pytest
from relax_core.config.root import RelaxConfig
from relax_core.testing.colours import write_model, write_rows


@pytest.fixture(scope="session")
def colours(tmp_path_factory):
    """The folder of the made task: rows.jsonl, its pictures, and the model beside them."""
    folder = tmp_path_factory.mktemp("colours")
    write_rows(folder)
    write_model(folder / "model")
    return folder


@pytest.fixture
def colours_run(colours):
    """The config of reinforcement learning on the task; sections given change single settings."""
    base = {
        "run": {"steps": 2, "device": "cpu", "progress": "none", "threads": 1, "seed": 0, "name": "colours"},
        "model": {"path": str(colours / "model"), "vision": "trained"},
        "data": {"path": str(colours / "rows.jsonl"), "images_key": "images"},
        "trainer": {"lr": 1e-2, "precision": "fp32"},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 16, "max_new_tokens": 1},
        "reward": {"function": "exact_match", "concurrency": 1},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
    }

    def make(**sections):
        names = {*base, *sections}
        return RelaxConfig.model_validate({n: {**base.get(n, {}), **sections.get(n, {})} for n in names})

    return make
