"""Sampling inside SGLang as Relax's embedded engine does it: the same seed draws the same tokens.

N rows, V vocabulary, D tokens of a row under verification (the last one drawn, then the drafts).
"""

from typing import Any

import torch
from torch import Tensor

from relax_rollout.sampling import SamplingTensors, draw
from relax_rollout.seeds import stream_of

_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def uniforms(stream_N: Tensor, position_N: Tensor) -> Tensor:
    """The uniform number of each row at a position of its sequence, as :func:`relax_rollout.seeds.uniforms`.

    Args:
        stream_N: int64, of :func:`stream`, which has the prompt's length in it.
        position_N: int64, position in prompt and completion of the token that the drawn one follows.

    Returns:
        float32 in (0, 1).
    """
    x = stream_N + (position_N.long() + 1) * _GAMMA
    # int64 shifts copy the sign; the masks make them those of unsigned words.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    bits = ((x ^ ((x >> 31) & (2**33 - 1))) >> 41) & (2**23 - 1)
    return ((bits.double() + 0.5) / 2.0**23).float()


def stream(seed: int, prompt_tokens: int) -> int:
    """The int64 that stands for a request's seed in a batch: its first token follows position prompt - 1."""
    word = (stream_of(seed) - (prompt_tokens - 1) * (_GAMMA + 2**64)) % 2**64
    return word - 2**64 if word >= 2**63 else word


def settings_of(info: Any, repeat: int = 1) -> SamplingTensors:
    """Of SGLang's batch; its top_k of 1 stands for greedy and one beyond any vocabulary for none."""
    top_k_N = info.top_ks.long()
    temperature_N = torch.where(top_k_N <= 1, 0.0, info.temperatures.view(-1))
    top_k_N = torch.where(top_k_N >= info.vocab_size, 0, top_k_N)
    return SamplingTensors(
        temperature_N.repeat_interleave(repeat),
        info.top_ps.repeat_interleave(repeat),
        top_k_N.repeat_interleave(repeat),
    )


def attach_streams(info: Any, batch: Any, vocab_size: int) -> Any:
    """After SGLang built a batch's sampling settings: a stream per request from its seed and prompt."""
    import secrets

    for request in batch.reqs:
        if request.sampling_params.sampling_seed is None:
            request.sampling_params.sampling_seed = secrets.randbits(63)
    info.sampling_seed = torch.tensor(
        [stream(r.sampling_params.sampling_seed, len(r.origin_input_ids)) for r in batch.reqs],
        dtype=torch.int64,
    ).to(info.device)
    return info


def build_sampler(backend: str | None = None) -> Any:
    """SGLang's sampler with our draw in it; log-probs are before top-k and top-p, in float32."""
    from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor

    class RelaxSampler(Sampler):  # type: ignore[misc]
        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[list[int]],
            positions: Tensor,
        ) -> Tensor:
            logits_NV = logits_output.next_token_logits
            if sampling_info.has_custom_logit_processor:
                apply_custom_logit_processor(logits_NV, sampling_info)
            settings = settings_of(sampling_info)
            token_N, _ = draw(logits_NV, settings, uniforms(sampling_info.sampling_seed, positions))
            if return_logprob:
                logprob_NV = (logits_NV.float() / sampling_info.temperatures).log_softmax(-1)
                self._attach_logprobs_to_output(
                    logits_output, logprob_NV, top_logprobs_nums, token_ids_logprobs, sampling_info, token_N
                )
            self._sync_token_ids_across_tp(token_N, sampling_info)
            return token_N.to(torch.int32)

    return RelaxSampler()


def accept(draft_ND: Tensor, drawn_ND: Tensor) -> Tensor:
    """How many drafts of each row stand: those equal, from the first on, to what the model itself drew.

    The drawn tokens are samples of the model's own distribution after the tokens before them, so the outcome
    has that distribution whatever the drafts are: a draft x stands with probability p(x), and where it falls,
    the token that stands instead has the distribution p without x. That is rejection sampling (Leviathan,
    Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding", section 2.3) for drafts
    that are certain.

    Args:
        draft_ND: int64; column 0 is the last token of the row, the others are drafts.
        drawn_ND: int64; column d follows column d of the drafts.

    Returns:
        int64 [N], from 0 to D - 1.
    """
    return (draft_ND[:, 1:] == drawn_ND[:, :-1]).long().cumprod(1).sum(1)


def verify(verify_input: Any, batch: Any, logits_output: Any, vocab_mask: Tensor | None = None) -> Any:
    """Takes the place of SGLang's ``eagle_sample``, which on some devices is greedy at any temperature.

    Returns:
        predict [N * D] int32, the drawn token at each place; the number of tokens that stand, the one drawn
        behind the last accepted draft included, [N] int32; and accept_index [N, D] int32, the places of
        those tokens in ``predict``, -1 behind them.
    """
    device = logits_output.next_token_logits.device
    if batch.forward_mode.is_idle():
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return empty, empty.clone(), empty.clone()
    if verify_input.topk != 1:
        raise ValueError(
            f"speculative_eagle_topk is {verify_input.topk}; Relax verifies chains of drafts: set it to 1"
        )
    rows, width = len(batch.seq_lens), verify_input.draft_token_num
    info, logits = batch.sampling_info, logits_output.next_token_logits
    for name in ("acc_additive_penalties", "logit_bias"):
        added = getattr(info, name)
        if added is not None:
            logits.add_(added.repeat_interleave(width, dim=0))
    if info.acc_scaling_penalties is not None:
        from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

        apply_scaling_penalties(logits, info.acc_scaling_penalties.repeat_interleave(width, dim=0))
    if vocab_mask is not None:
        verify_input.grammar.apply_vocab_mask(logits=logits, vocab_mask=vocab_mask)
    stream_ND = info.sampling_seed.to(device)[:, None].expand(-1, width)
    uniform = uniforms(stream_ND.reshape(-1), verify_input.positions)
    drawn, _ = draw(logits, settings_of(info, width), uniform)
    drawn_ND = drawn.view(rows, width)
    standing_N = accept(verify_input.draft_token.view(rows, width).long(), drawn_ND)
    place_ND = torch.arange(rows * width, device=device).view(rows, width)
    stands_ND = torch.arange(width, device=device) <= standing_N[:, None]
    accept_index = torch.where(stands_ND, place_ND, -1)[:, : verify_input.max_tree_depth]
    return drawn.to(torch.int32), (standing_N + 1).to(torch.int32), accept_index.to(torch.int32).contiguous()
