"""Every argument of the reference system's NPU scripts is set in the recipe that stands for it, or a comment
there or in a recipe that it extends says why not."""

import pytest
from relax_core.config import load_config
from relax_core.config.yaml_text import parse_yaml
from relax_core.recipes import builtin_recipes

# Argument of the script: setting and its value, or words of the comment that stands for it.
SHARED = {
    "advantage-estimator grpo": ("algorithm.name", "grpo"),
    "use-kl-loss, kl-loss-coef 0.00": ("algorithm.kl_loss_coef", 0.0),
    "kl-loss-type low_var_kl": ("algorithm.kl", "low_var"),
    "entropy-coef 0": ("algorithm.entropy_coef", 0.0),
    "eps-clip 0.2": ("algorithm.clip_low", 0.2),
    "eps-clip-high 0.28": ("algorithm.clip_high", 0.28),
    "lr 1e-6": ("trainer.lr", 1e-6),
    "lr-decay-style constant": ("trainer.schedule", "constant"),
    "weight-decay 0.1": ("trainer.weight_decay", 0.1),
    "adam-beta1 0.9": ("trainer.beta1", 0.9),
    "adam-beta2 0.98": ("trainer.beta2", 0.98),
    "attention- and hidden-dropout 0": "dropout 0, of which the model has none",
    "accumulate-allreduce-grads-in-fp32, attention-softmax-in-fp32": "softmax and router in float32",
    "attention-backend flash, use-flash-attn": "flash attention",
    "no-rope-fusion": "no fused rotary embedding",
    "no-gradient-accumulation-fusion": "no fused sum of gradients",
    "prompt-data dapo-math-17k": ("data.path", "zhuzilin/dapo-math-17k"),
    "input-key prompt": ("data.prompt_key", "prompt"),
    "label-key label": "rows of prompt (messages) and label",
    "apply-chat-template": ("data.chat", True),
    "rollout-shuffle": ("data.shuffle", True),
    "rm-type dapo, reward-key score": "the reference's `dapo` reward",
    "eval-prompt-data aime-2024": ("data.eval_path", "zhuzilin/aime-2024"),
    "n-samples-per-eval-prompt 8": ("eval.samples_per_prompt", 8),
    "eval-max-response-len 8192": ("eval.max_new_tokens", None),
    "log-passrate": ("eval.pass_at", (1, 2, 4, 8)),
    "skip-eval-before-train": ("eval.before", False),
    "megatron-to-hf-mode bridge, hf-checkpoint, ref-load": "read through a bridge",
    "max-actor-ckpt-to-keep 1": ("checkpoint.keep", 1),
    "max-staleness 0, colocate": ("cluster.placement", "colocate"),
    "num-data-storage-units 1": "storage units of a queue",
    "use-health-check, use-fault-tolerance": "health checks, by cluster.max_restarts",
    "ASCEND_, HCCL_ and TMS_ variables, ports": "ports among them, are relax-npu's",
    "balance-data": "Micro-batches are always balanced over ranks",
    "tensor-model-parallel-size 4": ("parallel.tensor", 4),
    "sequence-parallel": ("parallel.sequence", True),
    "expert-model-parallel-size 1": ("parallel.expert", 1),
    "pipeline-model-parallel-size 1": ("parallel.pipeline", 1),
    "context-parallel-size 1": ("parallel.context", 1),
    "qkv-format thd, use-dynamic-batch-size": ("trainer.packing", "thd"),
    "max-tokens-per-gpu 10240": ("trainer.micro_batch_tokens", 10240),
    "rollout-batch-size 32": ("rollout.prompts_per_step", 32),
    "n-samples-per-prompt 8": ("rollout.samples_per_prompt", 8),
    "global-batch-size 256": ("trainer.optimizer_steps_per_batch", 1),
    "rollout-max-response-len 8192": ("rollout.max_new_tokens", 8192),
    "rollout-temperature 1": ("rollout.temperature", 1.0),
    "optimizer-cpu-offload, overlap, precision-aware": "keeps the optimizer in host memory",
    "sglang-device npu": ("run.device", "npu"),
    "sglang-chunked-prefill-size 8192, max-prefill-tokens 8192": ("sglang.prefill_tokens", 8192),
    "sglang-enable-dp-attention, dp-lm-head": "Attention and head by data-parallel ranks",
    "sglang-attention-backend ascend": ("sglang.attention", "ascend"),
    "rollout-num-gpus-per-engine 4": ("sglang.tensor", 4),
    "use-tensorboard, use-metrics-service": ("run.trackers", ()),
}
MTP = {
    "recompute full, uniform, 1": ("trainer.recompute", "full"),
    "num-rollout 200": ("run.steps", 200),
    "use-tis, icepop": ("algorithm.correction", "icepop"),
    "mtp-num-layers 1 (guarded)": ("mtp.layers", None),
    "mtp-loss-scaling-factor 0.1": ("mtp.loss_coefficient", 0.1),
    "eval-interval 50": ("eval.every", 50),
    "eval-top-p 1": ("eval.top_p", 1.0),
    "save-interval 100": ("checkpoint.every", 100),
    "sglang-mem-fraction-static 0.6": "the reference's 0.6 does not fit",
    "sglang-cuda-graph-bs": ("sglang.graph_batches", (1, 2, 4, 8, 16, 24, 32, 48, 64)),
    "sglang-max-running-requests 64": ("rollout.max_batch_size", 64),
    "sglang-max-mamba-cache-size 352": "352 in the reference",
    "sglang-mamba-ssm-dtype bfloat16": "bfloat16 on every NPU",
    "sglang-mamba-scheduler-strategy extra_buffer": "(extra_buffer)",
    "sglang-speculative NEXTN, 2 steps, top-k 1, 3 tokens": ("rollout.draft_tokens", 2),
    "actor [1, 8]": ("cluster.trainer_ranks", 8),
    "rollout [1, 8]": ("cluster.engines", 2),
}
CP = {
    "context-parallel-size 4": ("parallel.context", 4),
    "calculate-per-token-loss": "Per-token loss",
    "use-distributed-optimizer": "always a distributed optimizer's",
    "recompute selective": ("trainer.recompute", "selective"),
    "data-pad-size-multiplier 4096": "padding to 4096 is not needed",
    "max-tokens-per-gpu 8192": ("trainer.micro_batch_tokens", 4 * 8192),
    "log-probs-max-tokens-per-gpu 8192": "also its 8192 tokens for log-probs",
    "num-rollout 1000": ("run.steps", 1000),
    "use-tis, icepop": ("algorithm.correction", "icepop"),
    "eval-interval 20": ("eval.every", 20),
    "eval-top-p 0.7": ("eval.top_p", 0.7),
    "save-interval 50": ("checkpoint.every", 50),
    "sglang-mem-fraction-static 0.8": "0.8 in the reference",
    "sglang-cuda-graph-bs 4 ... 256": "up to 256 in the reference",
    "sglang-disable-radix-cache": ("sglang.radix_cache", False),
    "no speculative decoding": ("rollout.draft_tokens", 0),
    "LD_LIBRARY_PATH of vendor operators": "path to vendor operators",
    "MINDSPEED_BRIDGE_GDN_USE_TORCH_CONV": "MINDSPEED_BRIDGE_GDN_USE_TORCH_CONV",
    "actor [1, 16], num-gpus-per-node 16": ("cluster.trainer_ranks", 16),
}
CAPTIONS = {
    "tensor 4": ("parallel.tensor", 4),
    "sequence-parallel": ("parallel.sequence", True),
    "pipeline 1": ("parallel.pipeline", 1),
    "context 1": ("parallel.context", 1),
    "expert 8": ("parallel.expert", 8),
    "expert-tensor 1": ("parallel.expert_tensor", 1),
    "recompute full": ("trainer.recompute", "full"),
    "optimizer-cpu-offload": "keeps the optimizer in host memory",
    "sft-chunked-logits 2048, cross-entropy-loss-fusion": "chunks of 2048 logits and fused cross",
    "prompt-data EN and ZH": "English and Chinese",
    "input-key conversations": ("data.messages_key", "conversations"),
    "multimodal-keys image: images": ("data.images_key", "images"),
    "key map from, value, human, gpt": "Keys from and value, roles human and gpt",
    "global-batch-size 64": ("sft.samples_per_step", 64),
    "max-tokens-per-gpu 20480": ("trainer.micro_batch_tokens", 20480),
    "balance-data, per-rank-fetch": "(per-rank fetch)",
    "sft-prefetch-num-workers 16": ("data.workers", 16),
    "sft-prefetch-buffer-size 512": ("data.batches_ahead", 512 // 64),
    "sft-max-in-flight-steps 4, data storage units 8": "4 steps in flight",
    "mtp-num-layers 1 (guarded)": ("mtp.layers", None),
    "mtp-loss-scaling-factor 0.2": ("mtp.loss_coefficient", 0.2),
    "lr 1e-5": ("trainer.lr", 1e-5),
    "min-lr 1e-6": ("trainer.min_lr", 1e-6),
    "cosine": ("trainer.schedule", "cosine"),
    "weight-decay 0.1": ("trainer.weight_decay", 0.1),
    "adam-beta1 0.9": ("trainer.beta1", 0.9),
    "adam-beta2 0.98": ("trainer.beta2", 0.98),
    "clip-grad 1.0": ("trainer.clip_grad", 1.0),
    "num-epoch 10": "ten times over its rows",
    "eval-size 0.1": ("data.eval_fraction", 0.1),
    "eval-interval 20": ("eval.every", 20),
    "save-interval 100": ("checkpoint.every", 100),
    "max-actor-ckpt-to-keep 1": ("checkpoint.keep", 1),
    "use-clearml, use-tensorboard": "ClearML by run.trackers",
    "sft [1, 0], actor [1, 8]": ("cluster.trainer_ranks", 8),
}
MOE = {
    "pipeline 2": ("parallel.pipeline", 2),
    "expert 8": ("parallel.expert", 8),
    "expert-tensor 1": ("parallel.expert_tensor", 1),
    "recompute full": ("trainer.recompute", "full"),
    "rollout-batch-size 16": ("rollout.prompts_per_step", 16),
    "num-rollout 3000": ("run.steps", 3000),
    "use-tis": ("algorithm.correction", "truncated"),
    "eval-interval 20": ("eval.every", 20),
    "save-interval 100": ("checkpoint.every", 100),
    "rollout-num-gpus-per-engine 8": ("sglang.tensor", 8),
    "sglang-mem-fraction-static 0.6": "0.6 in the reference",
    "sglang-max-running-requests 256": "256 in the reference; a step has 128",
    "sglang-cuda-graph-bs 4 ... 256": "the reference goes on to 256",
    "sglang-disable-radix-cache": ("sglang.radix_cache", False),
    "HCCL_SOCKET_IFNAME and others": "names of network cards",
    "HCCL_CONNECT_TIMEOUT 1200, ulimit 65535": "HCCL_CONNECT_TIMEOUT",
    "actor [1, 16]": ("cluster.trainer_ranks", 16),
}
TUNED = {
    "no recompute": ("trainer.recompute", "none"),
    "overlap-grad-reduce": ("trainer.overlap_grad_reduce", True),
    "overlap-param-gather": ("trainer.overlap_param_gather", True),
    "log-probs-max-tokens-per-gpu 40960": "40960 tokens for log-probs",
    "sglang-mem-fraction-static 0.85": "0.85 in the reference",
    "sglang-max-running-requests 272": "272 sequences at once",
    "sglang-cuda-graph-bs 2 8 16 ...": "up to 256 in the reference",
    "extra_buffer, max-mamba-cache-size 640": "640 states and a buffer of further ones",
    "max-prefill-tokens 16384": ("sglang.prefill_tokens", 16384),
    "round-robin router": "a round-robin router",
    "fastokens": "(fastokens)",
    "CPU_AFFINITY_CONF, SGLANG_NPU_ variables": "variables of the reference's own SGLang operators",
    "actor [1, 16]": ("cluster.trainer_ranks", 16),
}
MOE_TUNED = {
    "tensor 8": ("parallel.tensor", 8),
    "pipeline 2": ("parallel.pipeline", 2),
    "expert 16": ("parallel.expert", 16),
    "no recompute": ("trainer.recompute", "none"),
    "max-tokens-per-gpu 20480": ("trainer.micro_batch_tokens", 20480),
    "rollout-batch-size 16": ("rollout.prompts_per_step", 16),
    "optimizer-cpu-offload": "optimizer is in host memory here too",
    "GDN backend ascendc, torch conv, SGLANG_GMM2_TRITON": "AscendC with a torch convolution",
    "rollout-num-gpus-per-engine 8": ("sglang.tensor", 8),
    "sglang-mem-fraction-static 0.85": "0.85 in the reference",
    "sglang-max-running-requests 132": "132 in the reference",
    "sglang-cuda-graph-bs 4 8 16 24 32 ...": ("sglang.graph_batches", (4, 8, 16, 24, 32)),
    "sglang-disable-radix-cache": ("sglang.radix_cache", False),
    "max-mamba-cache-size 192": "192 states in the reference",
    "key/value groups fewer than tensor ranks": "More ranks than the two key/value heads",
    "2 nodes of 16": ("cluster.trainer_ranks", 32),
}
# What a script changes of the shared arguments is in its own table.
SCRIPTS = {
    "qwen35-9b-mtp-8xnpu-thd": SHARED | MTP,
    "qwen35-9b-cp-16xnpu": {k: v for k, v in SHARED.items() if k not in ("context-parallel-size 1",
                            "max-tokens-per-gpu 10240")} | CP,
    "qwen35-35b-a3b-sft-mtp-8xnpu": CAPTIONS,
    "qwen35-35b-a3b-16xnpu-thd": {k: v for k, v in SHARED.items() if k not in (
        "expert-model-parallel-size 1", "pipeline-model-parallel-size 1", "rollout-batch-size 32",
        "rollout-num-gpus-per-engine 4")} | MOE,
    "qwen35-9b-16xnpu-tuned": {k: v for k, v in SHARED.items() if "prefill" not in k} | TUNED,
    "qwen35-35b-a3b-32xnpu-tuned": MOE_TUNED,
}  # fmt: skip
ARGUMENTS = [(name, *pair) for name, script in SCRIPTS.items() for pair in script.items()]


def comments(name: str) -> str:
    """Of a recipe and those that it extends, in one line."""
    text = builtin_recipes()[name].read_text()
    base = parse_yaml(text)[0].get("extends")
    lines = (line.partition("#")[2].strip() for line in text.splitlines() if "#" in line)
    return " ".join([*lines, comments(base) if base else ""])


@pytest.mark.parametrize(("name", "argument", "stands"), ARGUMENTS, ids=str)
def test_an_argument_of_the_reference_is_set_or_a_comment_says_why_not(name, argument, stands):
    if isinstance(stands, str):
        assert stands in comments(name), argument
        return
    path, value = stands
    section, field = path.split(".")
    assert getattr(getattr(load_config(name), section), field) == value, argument
