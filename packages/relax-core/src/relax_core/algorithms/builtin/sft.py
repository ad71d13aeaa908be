"""Supervised fine-tuning."""

from relax_core.algorithms.algorithm import Algorithm

SFT = Algorithm(
    name="sft",
    summary="Supervised fine-tuning: the log-likelihood of given assistant tokens.",
    source="maximum likelihood",
    objective="-log pi",
    loop="sft",
    default_reduction="token_mean",
    reductions=frozenset({"token_mean", "sequence_mean"}),
    settings=frozenset({"reduction"}),
)
