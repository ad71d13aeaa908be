"""The cpu transfer: megatron sees a GPU that is the host, and nothing else in the process notices."""

import subprocess
import sys

import pytest
import torch
from relax_core.device import cpu_transfer
from relax_core.upstream import UnsupportedUpstreamError
from relax_core.upstream import correction as correction_module


@pytest.fixture(autouse=True)
def transfer():
    cpu_transfer.install()


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_another_megatron_version_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(cpu_transfer, "_replacements", {})
    monkeypatch.setattr(correction_module.importlib.metadata, "version", lambda name: "0.19.2")
    with pytest.raises(UnsupportedUpstreamError, match=r"made for megatron-core ==0\.16\.1, but .* 0\.19\.2"):
        cpu_transfer.install()
    assert not cpu_transfer.is_installed()


def test_installing_twice_changes_nothing_more():
    import megatron.core.tensor_parallel.layers as layers

    view, method = layers.torch, torch.Tensor.type
    cpu_transfer.install()
    assert layers.torch is view
    assert torch.Tensor.type is method


def test_megatron_sees_a_device_and_the_rest_of_the_process_does_not():
    import megatron.core.optimizer.clip_grads as megatron_module

    seen = megatron_module.torch
    assert seen is not torch
    assert seen.cuda.current_device() == torch.device("cpu")
    assert seen.zeros(3, device="cuda").device == torch.device("cpu")
    assert seen.tensor([1.0], device=seen.device("cuda"), pin_memory=True).tolist() == [1.0]
    assert not seen.cuda.is_available()
    assert seen.nn is torch.nn
    assert not torch.cuda.is_available()
    assert torch.zeros.__module__ != cpu_transfer.__name__
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        torch.zeros(3, device="cuda")


def test_type_names_a_cuda_type_only_to_megatron():
    code = "kind = tensor.type(); same = tensor.cuda(); half = tensor.type(torch.float16)"
    tensor = torch.ones(2, dtype=torch.bfloat16)
    inside = {"__name__": "megatron.core.anything", "tensor": tensor, "torch": torch}
    exec(code, inside)
    assert inside["kind"] == "torch.cuda.BFloat16Tensor"
    assert inside["same"] is tensor
    assert inside["half"].dtype == torch.float16
    assert tensor.type() == "torch.BFloat16Tensor"
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        tensor.cuda()


def test_a_megatron_that_was_imported_first_is_transferred_too():
    code = (
        "import torch, megatron.core.fusions.fused_bias_swiglu as f\n"
        "import megatron.core.optimizer.clip_grads as g\n"
        "import megatron.core.tensor_parallel.random as r, megatron.core.tensor_parallel as tp\n"
        "from relax_core.device import initialise\n"
        "initialise('cpu')\n"
        "print(hasattr(f.swiglu, '_torchdynamo_orig_callable'), g.torch is torch)\n"
        "with tp.get_cuda_rng_tracker().fork(): print(torch.rand(1).shape)\n"
        "print(f.swiglu(torch.tensor([0.0, 3.0])).tolist())"
    )
    assert run(code).splitlines() == ["False False", "torch.Size([1])", "[0.0]"]


def test_stream_and_event_calls_return_at_once():
    import megatron.core.optimizer.clip_grads as megatron_module

    cuda = megatron_module.torch.cuda
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    with cuda.stream(cuda.Stream()):
        cuda.current_stream().wait_stream(cuda.default_stream())
    end.record()
    assert end.query()
    assert 0 <= start.elapsed_time(end) < 1000


def test_the_forked_generator_advances_alone(recwarn, caplog):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(0)
    tracker.add("model-parallel-rng", 7)
    with tracker.fork():
        first = torch.rand(3)
    outside = torch.rand(3)
    with tracker.fork():
        second = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(outside, torch.rand(3))
    torch.manual_seed(7)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(3), torch.rand(3)]))
    assert not caplog.records
    with pytest.raises(KeyError, match="no generator state named 'other'"), tracker.fork("other"):
        pass


def test_transformers_still_works_in_the_same_process():
    from transformers import Qwen3_5TextConfig, set_seed
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    set_seed(0)
    with torch.device("meta"):
        assert Qwen3_5ForCausalLM(config).lm_head.weight.is_meta
    model = Qwen3_5ForCausalLM(config).eval()
    prompt = torch.tensor([[1, 2, 3]])
    out = model.generate(prompt, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(prompt))
    expected = prompt
    for _ in range(5):
        next_token = model(expected, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, next_token], 1)
    assert out.tolist() == expected.tolist()
    loss = model(prompt, labels=prompt).loss
    loss.backward()
    assert torch.isfinite(model.lm_head.weight.grad).all()
