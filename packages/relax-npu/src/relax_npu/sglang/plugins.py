"""Every correction of SGLang on the NPU, in the order in which they are installed."""

from relax_npu.sglang import cache_slots, ipc, sampler, streams, token_logprobs, verify, weights
from relax_npu.upstream.fix import Fix

_VERSIONS = ("0.5.15",)
_TESTS = "packages/relax-npu/simulated_tests/test_sglang_plugins.py"

PLUGINS: tuple[Fix, ...] = (
    Fix(
        name="sglang-sampled-verification",
        distribution="sglang",
        versions=_VERSIONS,
        module="sglang.srt.speculative.eagle_utils",
        expects={
            "eagle_sample": ("verify_input", "batch", "logits_output", "vocab_mask"),
            "torch.argmax": (),
            "verify_tree_greedy_func": (),
        },
        wrong="drafts are verified by the most likely token: at a temperature, not samples of the policy",
        apply=verify.apply,
        test=f"{_TESTS}::test_verified_tokens_are_samples_of_the_model",
    ),
    Fix(
        name="sglang-cache-slots",
        distribution="sglang",
        versions=_VERSIONS,
        module="sglang.srt.speculative.triton_ops.cache_locs",
        expects={
            "assign_extend_cache_locs_func": (
                *("req_pool_indices", "req_to_token", "start_offset", "end_offset"),
                *("batch_size", "draft_token_num", "device"),
            )
        },
        wrong="the NPU's kernel writes 16 slots into each row of the result, past its end (DDR error)",
        apply=cache_slots.apply,
        test=f"{_TESTS}::test_slots_end_with_the_row",
    ),
    Fix(
        name="sglang-one-top-k",
        distribution="sglang",
        versions=_VERSIONS,
        module="sglang.srt.layers.sampler",
        expects={
            "top_k_top_p_min_p_sampling_from_logits_ascend": (
                *(
                    "logits",
                    "top_ks",
                    "top_ps",
                    "min_ps",
                    "need_min_p_sampling",
                    "sampling_seed",
                    "positions",
                ),
            ),
            "multinomial_with_seed": (),
        },
        wrong="the vocabulary is searched twice, and a minimum probability raises TypeError",
        apply=sampler.apply,
        test=f"{_TESTS}::test_the_vocabulary_is_searched_once",
    ),
    Fix(
        name="sglang-token-logprobs",
        distribution="sglang",
        versions=_VERSIONS,
        module="sglang.srt.layers.sampler",
        expects={
            "Sampler._attach_logprobs_to_output": (
                *("self", "logits_output", "logprobs", "top_logprobs_nums", "token_ids_logprobs"),
            )
        },
        wrong="log-probs of given token ids written to another field are lost without a word",
        apply=token_logprobs.apply,
        test=f"{_TESTS}::test_log_probs_of_token_ids_arrive",
    ),
    Fix(
        name="sglang-second-stream",
        distribution="sglang",
        versions=_VERSIONS,
        module="sglang.srt.models.qwen2_moe",
        expects={
            "Qwen2MoeSparseMoeBlock.forward_normal_dual_stream": ("self", "hidden_states", "use_fused_gate")
        },
        wrong="with several streams the block waits for a second one, which is None on the NPU",
        apply=streams.apply,
        test=f"{_TESTS}::test_a_block_without_a_second_stream_uses_one",
    ),
    Fix(
        name="sglang-derived-weights",
        distribution="sglang",
        versions=_VERSIONS,
        module="sglang.srt.model_executor.model_runner",
        expects={f"ModelRunner.{name}": ("self",) for name in weights.UPDATES},
        wrong="copies derived from weights keep their old values after a weight update",
        apply=weights.apply,
        test=f"{_TESTS}::test_an_update_refills_the_transposed_convolution",
    ),
    Fix(
        name="sglang-ipc-payloads",
        distribution="sglang",
        versions=_VERSIONS,
        module="sglang.srt.utils.patch_torch",
        expects={
            "npu_verl_to_sglang": ("device",),
            "register_sgl_tp_rank": ("rank",),
            "_REDUCE_TENSOR_ARG_DEVICE_INDEX": (),
        },
        wrong="a rank opens every payload as memory of its own die, wherever it lies",
        apply=ipc.apply,
        test="packages/relax-npu/simulated_tests/test_sglang_payloads.py::test_a_payload_of_another_die_is_refused",
    ),
)


def install(*, version: str | None = None) -> None:
    """Installs every correction, before the engine's workers are imported.

    Raises:
        FixMismatchError: SGLang is of another version or looks otherwise; the engine must not start.
    """
    for plugin in PLUGINS:
        plugin.install(version=version)
