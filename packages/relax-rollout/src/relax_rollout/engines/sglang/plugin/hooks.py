"""What Relax changes in SGLang on every device."""

from typing import Any

from relax_rollout.engines.sglang.plugin import abort, control, memory, pictures, sampler, versions
from relax_rollout.engines.sglang.plugin.text_only import NoVision


def register(*, text_only: bool) -> None:
    """Register everything with SGLang's hook registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    components = "sglang.srt.managers.scheduler_components"
    updater = f"{components}.weight_updater.SchedulerWeightUpdaterManager"
    around = {
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": _with_streams,
        f"{updater}.check_weights": control.around_check_weights,
        f"{updater}.release_memory_occupation": memory.around_release,
        f"{components}.output_streamer._GenerationStreamAccumulator.accept": versions.around_accept,
        f"{scheduler}.abort_request": abort.around_abort_request,
    }
    if not text_only:
        processor = "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor"
        around[f"{processor}.process_mm_data_async"] = pictures.around_process
    for target, function in around.items():
        HookRegistry.register(target, function, HookType.AROUND)
    replaced: dict[str, Any] = {
        "sglang.srt.layers.sampler.create_sampler": sampler.build_sampler,
        "sglang.srt.speculative.eagle_utils.eagle_sample": sampler.verify,
        "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id": _no_stop_token,
    }
    if text_only:
        replaced["sglang.srt.models.qwen3_vl.Qwen3VLMoeVisionModel"] = NoVision
    for target, replacement in replaced.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)


def _with_streams(original: Any, *arguments: Any) -> Any:
    info = original(*arguments)
    return sampler.attach_streams(info, arguments[-2], arguments[-1])


def _no_stop_token(config: Any) -> None:
    """SGLang would end completions at the checkpoint's end-of-text token whether it was asked to or not."""
