"""Loading: what is refused, and what keeps its precision."""

import json
import shutil

import pytest
import torch
from relax_rollout import create_engine
from relax_rollout.engines.transformers.config import TransformersConfig
from relax_rollout.engines.transformers.load import load_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dtype": "float8"}, "dtype is 'float8'; allowed are auto, float32, bfloat16, float16"),
        ({"max_rows": 0}, "max_rows is 0; it must be a whole number of at least 1"),
        ({"max_prefill_tokens": 1.5}, "max_prefill_tokens is 1.5"),
        ({"version": -1}, "version is -1"),
        ({"model": "/nowhere"}, "no directory with a config.json"),
    ],
)
def test_settings_out_of_range_are_refused(models, wrong, words):
    with pytest.raises(ValueError, match=words):
        TransformersConfig(**({"model": models.get()} | wrong))


def test_unknown_options_are_refused_with_the_known(models):
    with pytest.raises(ValueError, match=r"no option temperature; it has model, dtype, device"):
        create_engine("transformers", model=models.get(), temperature=1.0)


def copy_of(models, tmp_path, change):
    directory = tmp_path / "model"
    shutil.copytree(models.get(), directory)
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_checkpoint_that_lacks_weights_is_refused(models, tmp_path):
    def drop(tensors):
        del tensors["model.norm.weight"]
        return tensors

    with pytest.raises(ValueError, match=r"lacks 1 weights of Qwen3_5ForCausalLM.*model\.norm\.weight"):
        load_model(TransformersConfig(copy_of(models, tmp_path, drop)))


def test_layers_without_a_cache_are_refused(tmp_path):
    config = Qwen3Config(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layers of kind sliding_attention"):
        load_model(TransformersConfig(tmp_path))


def test_stored_float32_decay_stays_float32_in_a_bfloat16_model(models):
    loaded = load_model(TransformersConfig(models.get(), dtype="bfloat16"))
    stored = models.load().state_dict()
    for name, tensor in loaded.state_dict().items():
        if name.endswith(("A_log", "dt_bias")):
            assert torch.equal(tensor, stored[name])
        else:
            assert torch.equal(tensor, stored[name].bfloat16())


def test_bfloat16_decay_stays_bfloat16(models, tmp_path):
    directory = copy_of(models, tmp_path, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    loaded = load_model(TransformersConfig(directory))
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.bfloat16}


def test_no_buffer_depends_on_weights(models):
    one, other = (load_model(TransformersConfig(models.get(seed=seed))) for seed in (0, 1))
    buffers = dict(one.named_buffers())
    assert buffers
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, buffers[name])
        assert name not in one.state_dict()


def test_no_gradients_and_no_dropout(models):
    model = load_model(TransformersConfig(models.get()))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
