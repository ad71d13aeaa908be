"""Drawing one token per row from logits. N rows, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ELEMENTS = 2**24
"""Logits worked on at once: several float32 copies of them are made, 64 MiB each."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The rows' settings: temperature and top-p float32, top-k int64; temperature 0 is greedy."""

    temperature_N: Tensor
    top_p_N: Tensor
    top_k_N: Tensor

    def rows(self, start: int, end: int) -> "SamplingTensors":
        """Those of some rows."""
        return SamplingTensors(
            self.temperature_N[start:end], self.top_p_N[start:end], self.top_k_N[start:end]
        )


def kept_NV(logits_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Which tokens top-k, then top-p on what it leaves (renormalised), keep; ties with the last one kept are
    kept.

    Top-p: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration", section 3.1.

    Args:
        logits_NV: float32, already divided by the temperature.
        top_k_N: int64, 0 keeps all.
        top_p_N: float32 in (0, 1].

    Returns:
        bool [N, V], at least one True per row.
    """
    vocabulary = logits_NV.shape[1]
    ranked_NV = logits_NV.sort(dim=-1, descending=True).values
    k_N1 = torch.where(top_k_N > 0, top_k_N, vocabulary).clamp(max=vocabulary)[:, None]
    kth_N1 = ranked_NV.gather(1, k_N1 - 1)
    ranked_NV = ranked_NV.masked_fill(ranked_NV < kth_N1, -torch.inf)
    mass_NV = ranked_NV.softmax(-1)
    before_NV = mass_NV.cumsum(-1) - mass_NV
    last_N1 = (before_NV < top_p_N[:, None]).sum(-1, keepdim=True) - 1
    floor_N1 = ranked_NV.gather(1, last_N1.clamp(min=0))
    return logits_NV >= torch.where(top_p_N[:, None] < 1, floor_N1, kth_N1)


def draw(logits_NV: Tensor, settings: SamplingTensors, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token per row by inverting the cumulative distribution in vocabulary order.

    Args:
        logits_NV: of the model, any floating dtype.
        settings: of the rows.
        uniform_N: float32 in (0, 1), one per row.

    Returns:
        token_N int64, and logprob_N float32: of the token at the row's temperature (1 for greedy) over the
        whole vocabulary, before top-k and top-p.
    """
    rows, vocabulary = logits_NV.shape
    step = max(1, MAX_ELEMENTS // vocabulary)
    parts = [
        _draw_part(logits_NV[at : at + step], settings.rows(at, at + step), uniform_N[at : at + step])
        for at in range(0, rows, step)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _draw_part(logits_NV: Tensor, settings: SamplingTensors, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    logits_NV = logits_NV.float()
    greedy_N = settings.temperature_N == 0
    if not bool((settings.temperature_N == 1).all()):
        logits_NV = logits_NV / torch.where(greedy_N, 1.0, settings.temperature_N)[:, None]
    logprob_NV = logits_NV.log_softmax(-1)
    mass_NV = logprob_NV.exp()
    cut_N = ((settings.top_k_N > 0) | (settings.top_p_N < 1)) & ~greedy_N
    if bool(cut_N.any()):
        rows = cut_N.nonzero()[:, 0]
        keep_NV = kept_NV(logits_NV[rows], settings.top_k_N[rows], settings.top_p_N[rows])
        mass_NV[rows] = mass_NV[rows] * keep_NV
    reached_NV = mass_NV.cumsum(-1)
    total_N1 = reached_NV[:, -1:]
    # Strictly below the total, so that rounding never points past the last token that has mass.
    target_N1 = torch.minimum(uniform_N[:, None] * total_N1, total_N1 * (1 - 2.0**-23))
    token_N = torch.searchsorted(reached_NV, target_N1, right=True)[:, 0]
    if bool(greedy_N.any()):
        token_N = torch.where(greedy_N, logits_NV.argmax(-1), token_N)
    # Only weights that are not finite leave a row without mass; the log-prob then says so to the caller.
    token_N = token_N.clamp(max=logits_NV.shape[1] - 1)
    return token_N, logprob_NV.gather(1, token_N[:, None])[:, 0]
