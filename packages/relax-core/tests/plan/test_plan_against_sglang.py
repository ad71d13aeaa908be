"""Bytes of caches in the plan, against SGLang's own pools, on torch's meta device, and its own sizing.

Runs where SGLang is installed (`nox -s sglang_cpu`).
"""

import os
from types import SimpleNamespace

import pytest
import torch
from relax_core.model.config import Qwen35Config
from relax_core.plan.devices import DEVICES
from relax_core.plan.engine_memory import Servers, StateSize, plan_servers, token_bytes
from relax_core.plan.shapes import published

if os.environ.get("RELAX_TEST_SGLANG") != "1":
    pytest.skip("SGLang's own environment runs it", allow_module_level=True)

from sglang.srt.configs import mamba_utils
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor import model_runner_kv_cache_mixin as sizing
from sglang.srt.model_executor import pool_configurator

MODELS = ["Qwen3.5-2B", "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-35B-A3B"]
GIB = 2**30


def model_of(name):
    return Qwen35Config.from_hf(published()[name])


def cache_params(model, devices: int, ssm_dtype: torch.dtype):
    """As SGLang's own config class of these models makes them."""
    shape = mamba_utils.Mamba2StateShape.create(
        tp_world_size=devices,
        intermediate_size=model.delta_value_dim * model.delta_value_heads,
        n_groups=model.delta_key_heads,
        num_heads=model.delta_value_heads,
        head_dim=model.delta_value_dim,
        state_size=model.delta_key_dim,
        conv_kernel=model.conv_width,
    )
    layers = [i for i, kind in enumerate(model.layer_types) if kind == "linear_attention"]
    dtype = mamba_utils.Mamba2StateDType(conv=torch.bfloat16, temporal=ssm_dtype)
    return mamba_utils.Mamba2CacheParams(shape=shape, layers=layers, dtype=dtype)


@pytest.fixture
def on_meta(monkeypatch):
    """Pools keep their shapes and take no memory, drafts' too, which ask for a GPU."""
    plain = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: plain(*a, **{**k, "device": "meta"}))
    # As on a GPU, whatever this machine has.
    monkeypatch.setattr(memory_pool, "_is_cpu", False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("npu", [False, True], ids=["gpu", "npu"])
@pytest.mark.parametrize("drafted", [None, 3])
def test_states_take_what_the_pool_takes(on_meta, monkeypatch, name, devices, npu, drafted):
    model = model_of(name)
    params = cache_params(model, devices, torch.bfloat16 if npu else torch.float32)
    size = StateSize.of(model, devices, npu=npu)
    assert size.size == params.mamba_cache_per_req
    monkeypatch.setattr(memory_pool, "_is_npu", npu)
    pool = memory_pool.MambaPool(
        size=96,
        spec_state_size=32,
        cache_params=params,
        mamba_layer_ids=params.layers,
        device="meta",
        speculative_num_draft_tokens=drafted,
        speculative_eagle_topk=1,
    )
    cache = pool.mamba_cache
    tensors = [*cache.conv, cache.temporal]
    if drafted:
        tensors += [cache.intermediate_ssm, *pool._intermediate_conv_window_phys]
    assert size.pool(96, 32, drafted or 0) == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_keys_and_values_take_what_the_pool_takes(on_meta, name, devices):
    model = model_of(name)
    full = [i for i, kind in enumerate(model.layer_types) if kind == "full_attention"]

    def pool(layers) -> int:
        made = memory_pool.HybridLinearKVPool(
            size=1023,
            dtype=torch.bfloat16,
            page_size=1,
            head_num=max(1, model.kv_heads // devices),
            head_dim=model.head_dim,
            full_attention_layer_ids=layers,
            device="cpu",
            mamba_pool=None,
        )
        return sum(t.nbytes for t in (*made.full_kv_pool.k_buffer, *made.full_kv_pool.v_buffer))

    assert 1024 * token_bytes(model, devices, drafts=False) == pool(full)
    # The draft model has one layer, whose pool is as long.
    assert 1024 * token_bytes(model, devices, drafts=True) == pool(full) + pool([0])


class Runner(sizing.ModelRunnerKVCacheMixin):
    """What SGLang's own sizing asks of its runner, with a device's memory instead of one."""

    def __init__(self, model, device, servers, *, devices, rows, draft_tokens, weights, ssm_dtype) -> None:
        params = cache_params(model, devices, ssm_dtype)
        full = [i for i, kind in enumerate(model.layer_types) if kind == "full_attention"]
        self.mambaish_config = SimpleNamespace(
            mamba2_cache_params=params, full_attention_layer_ids=full, linear_layer_ids=params.layers
        )
        self.server_args = SimpleNamespace(
            max_mamba_cache_size=servers.states,
            max_running_requests=rows,
            disable_radix_cache=not servers.prefixes,
            mamba_full_memory_ratio=0.9,
            speculative_num_draft_tokens=draft_tokens + 1 if draft_tokens else None,
            enable_dp_attention=False,
            enable_mamba_extra_buffer=lambda: False,
            disable_overlap_schedule=True,
        )
        self.spec_algorithm = SimpleNamespace(
            is_none=lambda: not draft_tokens,
            is_eagle=lambda: draft_tokens > 0,
            is_standalone=lambda: False,
            is_dflash=lambda: False,
        )
        self.eagle_draft_num_layers = 1
        self.mem_fraction_static = servers.fraction
        self.device, self.gpu_id, self.dp_size, self.is_draft_worker = "cuda", 0, 1, False
        self.start_layer, self.end_layer, self.use_mla_backend = 0, len(model.layer_types), False
        self.kv_cache_dtype = torch.bfloat16
        self.model_config = SimpleNamespace(
            context_len=262144,
            head_dim=model.head_dim,
            v_head_dim=model.head_dim,
            hf_config=SimpleNamespace(architectures=["Qwen3_5ForConditionalGeneration"]),
            get_num_kv_heads=lambda tp: max(1, model.kv_heads // tp),
        )
        self.free = device.memory / GIB - weights / GIB
        self.before = device.memory / GIB


SIZED = [
    ("Qwen3.5-9B", "h200", Servers(0.5, prefixes=False), 1, 64, 2),
    ("Qwen3.5-9B", "h200", Servers(0.5, prefixes=False), 1, 64, 0),
    ("Qwen3.5-9B", "h200", Servers(0.5, states=96), 1, 64, 2),
    ("Qwen3.5-4B", "h100", Servers(0.6), 2, 64, 0),
    ("Qwen3.5-4B", "h100", Servers(0.6), 1, 64, 2),
    ("Qwen3.5-35B-A3B", "910c-die", Servers(0.4, states=64, prefixes=False), 8, 64, 2),
    ("Qwen3.5-9B", "910c-die", Servers(0.5, prefixes=False), 4, 64, 2),
]


@pytest.mark.parametrize(("name", "device", "servers", "devices", "rows", "drafts"), SIZED, ids=str)
def test_a_server_decides_on_as_many_tokens_and_rows(
    monkeypatch, name, device, servers, devices, rows, drafts
):
    model, spec = model_of(name), DEVICES[device]
    found = plan_servers(
        model, spec, servers, devices=devices, rows=rows, most_rows=rows, length=1, draft_tokens=drafts
    )
    ssm = torch.bfloat16 if spec.kind == "npu" else torch.float32
    weights = found.weights + found.tower + found.draft
    runner = Runner(
        model, spec, servers, devices=devices, rows=rows, draft_tokens=drafts, weights=weights, ssm_dtype=ssm
    )
    monkeypatch.setattr(sizing, "get_available_gpu_memory", lambda *a, **k: runner.free)
    monkeypatch.setattr(sizing, "get_world_group", lambda: SimpleNamespace(world_size=1, cpu_group=None))
    monkeypatch.setattr(pool_configurator, "get_attention_tp_size", lambda: devices)
    room = runner._profile_available_bytes(runner.before)
    tokens = pool_configurator.DefaultPoolConfigurator(runner).calculate_pool_sizes(room, 1)
    assert found.cached_tokens == pytest.approx(tokens.max_total_num_tokens, abs=1)
    assert found.rows == runner._resolve_max_num_reqs(tokens.max_total_num_tokens)
