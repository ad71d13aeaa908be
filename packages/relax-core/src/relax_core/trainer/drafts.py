"""The loss terms of the draft layers.

Axes: T packed positions of this context-parallel rank, S scored ones, P those that a draft layer predicts
from, D hidden.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from relax_core.loss import LossTerm
from relax_core.model import LoadBalance, MtpConfig, Qwen35Model
from relax_core.trainer.ranks import Ranks
from relax_core.trainer.sample import MicroBatch, Sample


def draft_terms(
    model: Qwen35Model,
    hidden_TD: Tensor,
    batch: MicroBatch,
    logprob_S: Tensor,
    *,
    mtp: MtpConfig,
    temperature: float,
    ranks: Ranks,
    balance: LoadBalance | None,
) -> Iterator[LossTerm]:
    """Loss of each draft layer, and how often rejection sampling would keep what it proposes.

    A proposal x ~ q is kept with probability min(1, p(x) / q(x)), p the trunk's distribution (Leviathan
    et al. 2023, arXiv 2211.17192, section 2.3): sum_x min(p(x), q(x)) on average, which is also the mean
    of min(1, q(x) / p(x)) over x ~ p. Its mean over the given tokens is the teacher-forced acceptance:
    unbiased where the policy sampled them, an indication on other text.

    Args:
        model: the stage with the head.
        hidden_TD: the trunk's hidden states.
        batch: with one draft per depth.
        logprob_S: the trunk's log-probs of the scored targets.
        mtp: coefficient and what is detached.
        temperature: divides the logits.
        ranks: where this rank stands.
        balance: of this step, in a model with experts.
    """
    if not batch.drafts:
        return
    trunk_T = logprob_S.new_zeros(hidden_TD.shape[0]).index_copy(0, batch.scored_S, logprob_S.detach())
    if batch.row_places_T is not None:
        trunk_T = ranks.whole_row(trunk_T, batch.row_places_T)
    tokens = [draft.tokens_T for draft in batch.drafts]
    hidden = model.mtp_hidden(hidden_TD, tokens, batch.layout, balance=balance, pictures=batch.pictures)
    for depth, (draft, draft_TD) in enumerate(zip(batch.drafts, hidden, strict=True)):
        logprob_P = model.token_logprobs(
            draft_TD[draft.positions_P],
            draft.targets_P,
            temperature=temperature,
            all_targets=True,
            detach_head=mtp.detach_head,
        ).logprob_T
        kept_P = (logprob_P.detach() - trunk_T[draft.trunk_P]).clamp(max=0).exp()
        coefficient = mtp.loss_coefficient / len(batch.drafts)
        yield LossTerm(_name("loss", depth), -logprob_P, draft.weights_P, coefficient)
        yield LossTerm(_name("acceptance", depth), kept_P, draft.weights_P, coefficient=0)


def draft_denominators(samples: Sequence[Sample], depths: int) -> dict[str, float]:
    """Z of each draft layer: the loss mask over tokens that have `depth + 2` tokens before them."""
    counts: dict[str, float] = {}
    for depth in range(depths):
        total = float(sum(sample.mask_L[depth + 2 :].sum() for sample in samples))
        counts[_name("loss", depth)] = counts[_name("acceptance", depth)] = total
    return counts


def _name(what: str, depth: int) -> str:
    return f"mtp_{what}_{depth}"
