"""The list of parity cases."""

from __future__ import annotations

from relax_kernels.testing import (
    adam_cases,
    attention_cases,
    delta_rule_cases,
    expert_cases,
    isolation_cases,
    logprob_cases,
    small_cases,
)
from relax_kernels.testing.case import Case

__all__ = ["Case", "parity_cases"]


def parity_cases() -> tuple[Case, ...]:
    """Return every case of every operator; names are unique."""
    sources = (
        delta_rule_cases,
        small_cases,
        attention_cases,
        logprob_cases,
        expert_cases,
        adam_cases,
        isolation_cases,
    )
    return tuple(case for source in sources for case in source.cases())
