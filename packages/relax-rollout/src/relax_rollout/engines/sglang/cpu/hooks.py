"""Replaces what SGLang would run as Triton kernels on a CPU; called in every process of a CPU server."""

from typing import Any

from relax_rollout.engines.sglang.cpu import ops, speculative

_ATTENTION = "sglang.srt.layers.attention"


def register() -> None:
    """Register the replacements with SGLang's hook registry."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def attention(runner: Any) -> Any:
        from relax_rollout.engines.sglang.cpu.attention import CpuAttention

        return CpuAttention(runner)

    attention_registry.ATTENTION_BACKENDS["torch_native"] = attention
    speculative.replace_kernels()
    scatter = f"{_ATTENTION}.mamba.mamba_state_scatter_triton"
    pool = "sglang.srt.mem_cache.memory_pool"
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    locations = "sglang.srt.speculative.triton_ops.cache_locs"
    replaced: dict[str, Any] = {
        f"{_ATTENTION}.fla.layernorm_gated.rms_norm_gated": ops.rms_norm_gated,
        f"{scatter}.fused_mamba_state_scatter_with_mask": ops.fused_mamba_state_scatter_with_mask,
        f"{scatter}.fused_conv_window_scatter_with_mask": ops.fused_mamba_state_scatter_with_mask,
        f"{pool}.MHATokenToKVPool._init_kv_copy_and_warmup": _no_warmup,
        f"{locations}.assign_extend_cache_locs_func": speculative.assign_extend_cache_locs_func,
    }
    around: dict[str, Any] = {
        f"{pool}.MambaPool.__init__": speculative.on_cpu,
        "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__": _without_nccl,
        f"{factory}.create_decode_backend": speculative.decode_backend,
        f"{factory}.create_draft_extend_backend": speculative.extend_backend,
    }
    for target, function in replaced.items():
        HookRegistry.register(target, function, HookType.REPLACE)
    for target, function in around.items():
        HookRegistry.register(target, function, HookType.AROUND)
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER)


def _no_warmup(pool: Any) -> None:
    """SGLang would warm up a Triton kernel that moves drafted keys; chains move none."""


def _without_nccl(original: Any, *arguments: Any, **more: Any) -> Any:
    """Ranks on a CPU talk by gloo alone; this release would open NCCL's library for them too."""
    return original(*arguments, **more | {"use_pynccl": False})


def _fork(result: Any, *arguments: Any, **more: Any) -> None:
    """Children of a CPU server are forked: they need not import SGLang again, which takes most of a start."""
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)
