"""Slices of the vocabulary, in which log-probs are made: the plan's are those of the kernels."""

import pytest
from relax_core.plan.head import LOGITS_AT_ONCE, slice_width
from relax_kernels.triton_backend.logprob_slices import slices_of


@pytest.mark.parametrize("vocabulary", [512, 5120, 62080, 248320])
@pytest.mark.parametrize("tokens", [1, 63, 1024, 8191, 20480, 131072, 300_000])
def test_the_widest_slice_is_the_kernels(tokens, vocabulary):
    widest = max(entries for _, entries in slices_of(tokens, vocabulary, None))
    assert slice_width(tokens, vocabulary) == widest


def test_a_published_vocabulary_passes_in_a_bounded_number_of_logits():
    """8192 tokens x 248320 logits would be 7.6 GiB in float32."""
    assert 8192 * slice_width(8192, 248320) <= 1.02 * LOGITS_AT_ONCE
