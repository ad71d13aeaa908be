"""Arguments of a server, derived from model and recipe."""

import pytest
from relax_npu.engine import EngineShape, engine_environment, launch_arguments

HYBRID = {"full_attention_interval": 4, "mtp_num_hidden_layers": 1}


def test_a_hybrid_model_has_no_prefix_cache_and_a_state_cache() -> None:
    told = launch_arguments({"text_config": HYBRID}, EngineShape(devices=4, max_requests=64, draft_tokens=2))
    assert told["device"] == "npu"
    assert told["attention_backend"] == "ascend"
    assert told["disable_radix_cache"] is True
    assert told["mamba_ssm_dtype"] == "bfloat16", "float32 states would be read as bfloat16"
    assert told["max_mamba_cache_size"] == told["max_running_requests"] == 64, "more would lie idle"
    assert told["page_size"] == 128
    assert told["tp_size"] == 4
    assert max(told["cuda_graph_bs_decode"]) == 64


def test_a_plain_model_keeps_its_prefix_cache() -> None:
    told = launch_arguments({}, EngineShape(devices=2))
    assert "disable_radix_cache" not in told
    assert "speculative_algorithm" not in told


def test_drafts_are_one_chain() -> None:
    told = launch_arguments(HYBRID, EngineShape(devices=1, draft_tokens=2))
    assert told["speculative_algorithm"] == "NEXTN"
    assert (told["speculative_num_steps"], told["speculative_eagle_topk"]) == (2, 1)
    assert told["speculative_num_draft_tokens"] == 3


def test_drafts_without_draft_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a model with MTP layers"):
        launch_arguments({"full_attention_interval": 4}, EngineShape(devices=1, draft_tokens=2))


def test_attention_groups_divide_the_dies() -> None:
    told = launch_arguments({}, EngineShape(devices=8, data_parallel=4))
    assert told["dp_size"] == 4
    assert told["enable_dp_attention"] is told["enable_dp_lm_head"] is True
    with pytest.raises(ValueError, match="data_parallel=3 does not divide devices=8"):
        launch_arguments({}, EngineShape(devices=8, data_parallel=3))


def test_a_shared_die_takes_less_memory_in_fixed_segments() -> None:
    shared, own = EngineShape(devices=1, colocated=True), EngineShape(devices=1)
    assert (
        launch_arguments({}, shared)["mem_fraction_static"] < launch_arguments({}, own)["mem_fraction_static"]
    )
    assert engine_environment(shared)["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:False"
    assert "PYTORCH_NPU_ALLOC_CONF" not in engine_environment(own)
    assert engine_environment(own)["SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT"] == "1"
