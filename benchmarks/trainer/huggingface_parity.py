"""The trainer's model on one CUDA device against transformers' in float32 on the CPU: one JSON line a case.

    python benchmarks/trainer/huggingface_parity.py

Weights travel through a checkpoint and the bridge, as in a run. Compared: the log-prob of every next token,
and the gradient of their mean with respect to every tensor, under transformers' names. Allowed, as fractions
of the largest value of each gradient: float32 2e-3 (TF32 is off; both sides sum small differences of large
numbers, most in the decay's gradient), bfloat16 0.15 (every activation is rounded to 8 bits, through four
layers and back), and for the mean difference of a log-prob 1e-5 and 0.05. `cosine` is the smallest over the
tensors.
Exit status 1 if a case fails.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from relax_bridge import Checkpoint, model_map
from relax_core.device import initialise, shutdown
from relax_core.model import Qwen35Config, build_model, named_weights
from relax_core.packing import PackedLayout

LENGTHS = (1, 63, 64, 65, 200, 127)
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 16, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
KINDS = {
    "dense": ({"intermediate_size": 512}, (torch.float32, torch.bfloat16)),
    "4 of 16 experts": (EXPERTS | {"num_experts_per_tok": 4}, (torch.float32,)),
    # Where rounding tips the choice of an expert the results differ by right: bfloat16 chooses all.
    "16 of 16 experts": (EXPERTS | {"num_experts_per_tok": 16}, (torch.bfloat16,)),
}
ALLOWED = {torch.float32: (1e-5, 2e-3, 0.99999), torch.bfloat16: (0.05, 0.15, 0.995)}


def transformers_model(kind: str) -> Any:
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

    torch.manual_seed(3)
    sizes = SIZES | KINDS[kind][0]
    if kind == "dense":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, attn_implementation="eager"))
    else:
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**sizes, attn_implementation="eager"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.randn_like(parameter))
            elif not name.endswith("A_log"):
                parameter.mul_(2)
            # Both models are given weights that bfloat16 can hold.
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.float()


def expected(model: Any, tokens: list[torch.Tensor], folder: Path) -> torch.Tensor:
    """Save weights and gradients as checkpoints below a folder; return the log-probs of every next token."""
    model.save_pretrained(folder / "weights")
    logprobs = []
    for own in tokens:
        logits = model(own[None], use_cache=False).logits[0, :-1]
        logprobs.append(torch.log_softmax(logits, -1).gather(-1, own[1:, None])[:, 0])
    scored = torch.cat(logprobs)
    scored.mean().backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(folder / "gradients")
    return scored.detach()


def measure(
    kind: str, dtype: torch.dtype, folder: Path, logprob_S: torch.Tensor, tokens: list[torch.Tensor]
) -> bool:
    checkpoint, grads = Checkpoint.open(folder / "weights"), Checkpoint.open(folder / "gradients")
    weights = model_map(checkpoint.config, names=checkpoint.names)
    ours = build_model(Qwen35Config.from_hf(checkpoint.config), dtype=dtype, device="cuda")
    named = dict(named_weights(ours))
    for name, tensor in weights.import_tensors(checkpoint):
        named[name].copy_(tensor)
    layout = PackedLayout.build([len(own) for own in tokens])
    tokens_T = torch.cat(tokens).cuda()
    index_T, valid_T = layout.ahead(1, "cuda")
    targets_T = tokens_T[index_T].masked_fill(~valid_T, -1)
    scored_T = ours.token_logprobs(ours(tokens_T, layout), targets_T).logprob_T
    scored_S = scored_T[valid_T]
    scored_S.mean().backward()
    logprobs = (scored_S.detach().float().cpu() - logprob_S).abs()
    for parameter in ours.parameters():
        parameter.data = parameter.grad
    gradients = {name: grad.float().cpu() for name, grad in named_weights(ours)}
    errors, cosines = {}, {}
    for name, grad in weights.export_tensors(gradients):
        theirs = grads.tensor(name)
        errors[name] = float((grad - theirs).abs().max() / theirs.abs().max())
        cosines[name] = float(torch.cosine_similarity(grad.flatten(), theirs.flatten(), 0))
    worst, least = max(errors, key=lambda n: errors[n]), min(cosines, key=lambda n: cosines[n])
    allowed = ALLOWED[dtype]
    good = (
        float(logprobs.mean()) <= allowed[0] and errors[worst] <= allowed[1] and cosines[least] >= allowed[2]
    )
    line = {
        "case": f"{kind} {dtype}".replace("torch.", ""),
        "logprob_mean_difference": float(logprobs.mean()),
        "logprob_max_difference": float(logprobs.max()),
        "gradient_error": errors[worst],
        "of": worst,
        "cosine": cosines[least],
        "cosine_of": least,
        "tensors": len(errors),
        "parity": "equal" if good else f"failed: allowed {allowed}",
    }
    print(json.dumps(line), flush=True)
    return good


def main() -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator) for n in LENGTHS]
    good = True
    initialise("cuda", seed=7)
    for kind in KINDS:
        theirs = transformers_model(kind)
        with tempfile.TemporaryDirectory() as name:
            reference = expected(theirs, tokens, Path(name))
            for dtype in KINDS[kind][1]:
                good &= measure(kind, dtype, Path(name), reference, tokens)
    shutdown()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
