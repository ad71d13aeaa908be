"""Speed of the whole tiny model on the CPU beside Hugging Face's: one JSON line a case.

    OMP_NUM_THREADS=1 python benchmarks/kernels/model.py [--only SUBSTRING] [--rounds 7] [--profile]

Both sides hold the same weights and compute the log-probabilities of the same next tokens and the gradients
of their sum by every weight: relax-core's `Qwen35Model` over the packed samples, `Qwen3_5ForCausalLM` over
the samples padded to the longest. (It gets no attention mask: behind a sample's end no result is read, and it
is quicker without.) Log-probabilities and gradients are compared first; a case that differs prints no time
and makes the exit status 1. `ours_off`, `peer_off`: the largest difference of a gradient from that of our
model in float64. Then both sides run in turn in this process. `times_faster` is the ratio of the medians of
processor time, `quartiles` those of the ratio of each round; `tokens_per_s` counts real tokens.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from cpu import seconds
from relax_bridge import model_map
from relax_core.device import initialise, shutdown
from relax_core.model import Qwen35Config, Qwen35Model, build_model
from relax_core.packing import PackedLayout
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
CASES: dict[str, tuple[int, ...]] = {
    "256 samples of 12 to 20 tokens": tuple(12 + 5 * i % 9 for i in range(256)),
    "32 samples of 20 to 144 tokens": tuple(20 + 4 * (11 * i % 32) for i in range(32)),
    "4 samples of 256 tokens": (256,) * 4,
    "1 sample of 1024 tokens": (1024,),
    "1 sample of 4096 tokens": (4096,),
}
ALLOWED, ALLOWED_OF_DECAYS = 2e-5, 5e-4
"""Largest difference, as a fraction of the largest value, float32; of `A_log` and `dt_bias` more: their
gradients are sums of small terms of both signs, in which transformers is up to 2e-4 off float64."""


@dataclass
class Sides:
    ours: Qwen35Model
    exact: Qwen35Model
    """Ours in float64."""
    theirs: Qwen3_5ForCausalLM


def make_sides() -> Sides:
    ours = build_model(Qwen35Config.from_hf(CONFIG))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    exact = build_model(Qwen35Config.from_hf(CONFIG), dtype=torch.float64)
    exact.load_state_dict(ours.state_dict())
    theirs = Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**CONFIG))
    weights = dict(model_map(CONFIG).export_tensors(dict(ours.named_parameters())))
    missing = theirs.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    theirs.tie_weights()
    return Sides(ours, exact, theirs)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients under Hugging Face's names."""
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return dict(model_map(CONFIG).export_tensors(named)) if isinstance(model, Qwen35Model) else named


def our_side(model: Qwen35Model, samples: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    lengths = [len(sample) for sample in samples]
    tokens_T = torch.cat(list(samples))
    target_T = torch.cat([F.pad(sample[1:], (0, 1), value=-1) for sample in samples])

    def run() -> torch.Tensor:
        hidden_TD = model(tokens_T, PackedLayout.build(lengths))
        logprob_T = model.token_logprobs(hidden_TD, target_T).logprob_T
        logprob_T.sum().backward()
        return logprob_T.detach()[target_T >= 0]

    return run


def their_side(model: Qwen3_5ForCausalLM, samples: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    def padded(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)

    tokens_BT = padded(samples, 0)
    target_BT = padded([F.pad(sample[1:], (0, 1), value=-1) for sample in samples], -1)

    def run() -> torch.Tensor:
        logits = model(tokens_BT, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), target_BT.flatten(), ignore_index=-1, reduction="none")
        (-loss.sum()).backward()
        return -loss.detach()[target_BT.flatten() >= 0]

    return run


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    gap = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()
    return gap if gap == gap else float("inf")


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Return the largest difference of a gradient, and that of those of the decays."""
    gaps = {name: difference(ours[name], gradient) for name, gradient in theirs.items()}
    decays = {name for name in gaps if name.endswith(("A_log", "dt_bias"))}
    return max(gaps[name] for name in gaps.keys() - decays), max(gaps[name] for name in decays)


def measure(name: str, lengths: Sequence[int], sides: Sides, rounds: int, profile: bool) -> bool:
    generator = torch.Generator().manual_seed(2)
    samples = [torch.randint(0, CONFIG["vocab_size"], (n,), generator=generator) for n in lengths]
    models = {"ours": sides.ours, "peer": sides.theirs, "exact": sides.exact}
    runs = {
        "ours": our_side(sides.ours, samples),
        "peer": their_side(sides.theirs, samples),
        "exact": our_side(sides.exact, samples),
    }

    def step(side: str) -> torch.Tensor:
        models[side].zero_grad(set_to_none=True)
        return runs[side]()

    logprobs = {side: step(side) for side in runs}
    grads = {side: gradients(model) for side, model in models.items()}
    of_weights, of_decays = differences(grads["ours"], grads["peer"])
    found = {
        "logprob_difference": difference(logprobs["ours"], logprobs["peer"]),
        "gradient_difference": of_weights,
        "gradient_difference_of_decays": of_decays,
        "ours_off": max(differences(grads["ours"], grads["exact"])),
        "peer_off": max(differences(grads["peer"], grads["exact"])),
    }
    line: dict[str, Any] = {
        "case": name,
        "peer": f"transformers {transformers.__version__} Qwen3_5ForCausalLM",
    }
    line |= {what: float(f"{gap:.2g}") for what, gap in found.items()}
    if max(found["logprob_difference"], of_weights) > ALLOWED or of_decays > ALLOWED_OF_DECAYS:
        print(json.dumps({**line, "parity": f"failed: {ALLOWED}, {ALLOWED_OF_DECAYS} allowed"}), flush=True)
        return False
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
    for _ in range(rounds):
        for side, measured in times.items():
            measured.append(seconds(lambda side=side: step(side)))
    cpu = {side: statistics.median(t[0] for t in measured) for side, measured in times.items()}
    wall = {side: statistics.median(t[1] for t in measured) for side, measured in times.items()}
    ratios = [peer[0] / ours[0] for ours, peer in zip(times["ours"], times["peer"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    line |= {f"{side}_ms": round(value * 1e3, 1) for side, value in cpu.items()}
    line |= {f"{side}_wall_ms": round(value * 1e3, 1) for side, value in wall.items()}
    line |= {"times_faster": round(cpu["peer"] / cpu["ours"], 2)}
    line |= {"quartiles": [round(quartiles[0], 2), round(quartiles[2], 2)]}
    line |= {"tokens_per_s": round(sum(lengths) / cpu["ours"]), "threads": torch.get_num_threads()}
    print(json.dumps(line), flush=True)
    if profile:
        for side in times:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                step(side)
            print(side, profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=18))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="also print each side's operators")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    initialise("cpu", seed=0)
    try:
        sides = make_sides()
        chosen = {name: lengths for name, lengths in CASES.items() if arguments.only in name}
        results = [
            measure(name, lengths, sides, arguments.rounds, arguments.profile)
            for name, lengths in chosen.items()
        ]
    finally:
        shutdown()
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
