"""A server's arguments and environment on the NPU, derived from the model and the recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_npu import hccl
from relax_npu.allocator import VARIABLE as ALLOCATOR

_GRAPH_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_PAGE = 128
_PREFILL = 8192


@dataclass(frozen=True)
class EngineShape:
    """What a recipe says about one engine.

    Attributes:
        devices: dies of the engine, its tensor-parallel size.
        colocated: whether the trainer shares them.
        max_requests: running at once.
        draft_tokens: drafted by the MTP layer at a time; 0 without speculative decoding.
        data_parallel: groups of dies that attend to requests of their own.
    """

    devices: int
    colocated: bool = False
    max_requests: int = 64
    draft_tokens: int = 0
    data_parallel: int = 1


def launch_arguments(model: Mapping[str, Any], shape: EngineShape) -> dict[str, Any]:
    """Arguments of `sglang.launch_server` by name (underscores), for a model's config.json.

    Raises:
        ValueError: devices, groups or drafts do not fit.
    """
    if shape.devices < 1 or shape.devices % shape.data_parallel:
        raise ValueError(
            f"data_parallel={shape.data_parallel} does not divide devices={shape.devices}; "
            "give a divisor of the engine's dies"
        )
    text = model.get("text_config", model)
    hybrid = "linear_attention" in text.get("layer_types", ()) or "full_attention_interval" in text
    drafts = int(text.get("mtp_num_hidden_layers", 0))
    if shape.draft_tokens and not drafts:
        raise ValueError(
            "draft_tokens needs a model with MTP layers (mtp_num_hidden_layers is 0); set it to 0"
        )
    arguments: dict[str, Any] = {
        "device": "npu",
        "attention_backend": "ascend",
        "sampling_backend": "ascend",
        "tp_size": shape.devices,
        "page_size": _PAGE,
        "mem_fraction_static": 0.6 if shape.colocated else 0.8,
        "chunked_prefill_size": _PREFILL,
        "max_prefill_tokens": _PREFILL,
        "max_running_requests": shape.max_requests,
        "cuda_graph_bs_decode": [size for size in _GRAPH_BATCHES if size <= shape.max_requests],
    }
    if hybrid:
        # Its prefix cache wants pages of one token.
        arguments |= {
            "disable_radix_cache": True,
            # The NPU's recurrent kernels read states in bfloat16, whatever they were stored in.
            "mamba_ssm_dtype": "bfloat16",
            # Without that cache no state outlives its request; those of drafts SGLang sets aside itself.
            "max_mamba_cache_size": shape.max_requests,
        }
    if shape.data_parallel > 1:
        arguments |= {
            "dp_size": shape.data_parallel,
            "enable_dp_attention": True,
            "enable_dp_lm_head": True,
        }
    if shape.draft_tokens:
        arguments |= {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": shape.draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": shape.draft_tokens + 1,
        }
    return arguments


def engine_environment(shape: EngineShape) -> dict[str, str]:
    """Environment of an engine's process.

    Weights keep the layout that they were loaded in, for an update writes them in that one.
    """
    variables = {"SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": "1", "STREAMS_PER_DEVICE": "32"}
    if shape.colocated:
        # Memory that is given back and taken again does not go with segments that grow.
        variables[ALLOCATOR] = "expandable_segments:False"
    return variables


class NpuServers:
    """What relax-rollout asks for SGLang servers on the NPU (entry point `relax_rollout.sglang_devices`).

    Attributes:
        plugins: names of the entry points in `sglang.srt.plugins` that a server must load.
    """

    plugins = ("relax_npu",)

    def arguments(
        self, model: Mapping[str, Any], *, devices: int, max_requests: int, draft_tokens: int
    ) -> dict[str, Any]:
        """See `launch_arguments`; relax-rollout's servers always give their memory back on demand."""
        return launch_arguments(model, EngineShape(devices, True, max_requests, draft_tokens))

    def environment(self, *, devices: int, draft_tokens: int) -> dict[str, str]:
        """See `engine_environment`; with the ports that a die shared with the trainer needs."""
        shape = EngineShape(devices, colocated=True, draft_tokens=draft_tokens)
        return hccl.hccl_environment(processes_per_die=2) | engine_environment(shape)
