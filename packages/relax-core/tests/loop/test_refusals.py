"""What a run refuses, or stops at, with a sentence instead of a traceback."""

import json
import shutil

import pytest
import torch
from relax_core.loop import run
from relax_core.run import RunDirectory
from relax_core.trainer.folders import list_checkpoints
from safetensors.torch import load_file, save_file


@pytest.fixture
def changed(small_model, tmp_path):
    """A copy of the small checkpoint with another config or other tensors."""

    def change(*, tensors=None, **config):
        folder = tmp_path / "changed"
        shutil.copytree(small_model, folder)
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
        weights = folder / "model.safetensors"
        save_file({**load_file(weights), **(tensors or {})}, weights, metadata={"format": "pt"})
        return {"path": str(folder)}

    return change


def stops(config, path, words):
    with RunDirectory.create(path, config) as directory, pytest.raises(ValueError, match=words):
        run(config, directory, resume=False)
    return directory


def test_weights_that_have_overflowed_stop_the_run_and_leave_the_checkpoint(small_run, tmp_path):
    config = small_run(
        trainer={"lr": 1e3, "clip_grad": 0.0}, run={"steps": 20}, checkpoint={"every": 1, "keep": 50}
    )
    words = "logits .* are not finite .* a lower trainer.lr|gradient norm is (nan|inf)"
    directory = stops(config, tmp_path / "run", words)
    assert list_checkpoints(directory.checkpoints)
    assert not directory.finished


def test_a_checkpoint_with_nan_is_refused(small_run, changed, small_model, tmp_path):
    name = "model.norm.weight"
    nan = torch.full_like(load_file(small_model / "model.safetensors")[name], torch.nan)
    stops(small_run(model=changed(tensors={name: nan})), tmp_path / "run", "logits .* are not finite")


def test_a_prompt_beyond_the_context_is_refused_before_the_first_step(small_run, changed, tmp_path):
    model = changed(max_position_embeddings=12)
    directory = stops(small_run(model=model), tmp_path / "run", "exceed the model's context of 12 tokens")
    assert not directory.metrics.exists()


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_a_tokenizer_of_another_model_is_refused(small_run, small_model, changed, tmp_path, name):
    weights = load_file(small_model / "model.safetensors")
    heads = ("model.embed_tokens.weight", "lm_head.weight")
    model = changed(vocab_size=60, tensors={head: weights[head][:60].clone() for head in heads})
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 plus 1", "completion": "2", "answer": "2"}\n')
    data = {"path": str(tmp_path / "rows.jsonl"), "eval_path": None}
    config = small_run(model=model, data=data, algorithm={"name": name})
    stops(config, tmp_path / "run", "beyond the model's vocabulary of 60")


def test_a_tokenizer_that_cannot_be_used_is_refused(small_run, changed, tmp_path):
    model = changed()
    (tmp_path / "changed" / "tokenizer.json").write_text("{}")
    stops(small_run(model=model), tmp_path / "run", "no tokenizer can be read from .*changed")


def _too_large(*args, **kwargs):
    torch.empty(2**50)


def _of_a_gpu(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the docs")


def _defect(*args, **kwargs):
    raise RuntimeError("a defect")


@pytest.mark.parametrize("fails", [_too_large, _of_a_gpu])
def test_too_little_memory_says_what_to_lower(small_run, tmp_path, monkeypatch, fails):
    monkeypatch.setattr("relax_core.trainer.trainer.Trainer.step", fails)
    stops(small_run(), tmp_path / "run", r"out of memory: [^\n]*\. Lower trainer\.micro_batch_tokens")


def test_a_defect_is_not_called_a_want_of_memory(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr("relax_core.trainer.trainer.Trainer.step", _defect)
    config = small_run()
    with (
        RunDirectory.create(tmp_path / "run", config) as directory,
        pytest.raises(RuntimeError, match="defect"),
    ):
        run(config, directory, resume=False)
