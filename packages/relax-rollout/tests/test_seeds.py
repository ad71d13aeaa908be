"""Counter-based random numbers are uniform, independent across places, and stable."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax_rollout import derive_seed
from relax_rollout.seeds import uniforms

SPLITMIX64_OF_ZERO = 0xE220A8397B1DCDAF
"""First output of SplitMix64 for state 0: published in the test vectors of several libraries."""


def test_the_mixer_is_splitmix64():
    assert derive_seed(0) == SPLITMIX64_OF_ZERO % 2**63


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31))
def test_rows_are_the_splitmix64_sequence_of_their_mixed_seed(seed, position):
    # The nth output of SplitMix64 for a state is mix(state + n * gamma).
    gamma = 0x9E3779B97F4A7C15
    state = splitmix64((seed + gamma) % 2**64)
    wanted = ((splitmix64((state + (position + 1) * gamma) % 2**64) >> 41) + 0.5) / 2**23
    assert uniforms([seed], [position])[0] == np.float32(wanted)


def splitmix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_numbers_are_uniform_over_seeds_and_over_positions():
    n, bins = 40_000, 50
    for seeds, positions in ((range(n), [0] * n), ([7] * n, range(n))):
        counts = np.histogram(uniforms(seeds, positions), bins=bins, range=(0, 1))[0]
        chi2 = ((counts - n / bins) ** 2 / (n / bins)).sum()
        assert chi2 < 100  # 49 degrees of freedom: the upper 1e-4 point is 94.6, the seeds are fixed


def test_neighbouring_places_are_unrelated():
    seeds = np.arange(20_000)
    now, later = uniforms(seeds, seeds * 0), uniforms(seeds, seeds * 0 + 1)
    assert abs(np.corrcoef(now, later)[0, 1]) < 0.03
    assert abs(np.corrcoef(now[1:], now[:-1])[0, 1]) < 0.03


def test_no_seed_is_another_shifted_by_a_place():
    seeds = np.arange(1000)
    assert not np.intersect1d(uniforms(seeds + 1, seeds * 0), uniforms(seeds, seeds * 0 + 1)).size > 5


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_numbers_are_strictly_between_zero_and_one(seed, position):
    (value,) = uniforms([seed], [position])
    assert value.dtype == np.float32
    assert 0 < value < 1


def test_a_row_does_not_depend_on_its_neighbours():
    assert uniforms([5, 6, 7], [0, 1, 2])[1] == uniforms([6], [1])[0]


def test_derived_seeds_differ_by_place_and_order():
    seeds = {derive_seed(base, a, b) for base in range(5) for a in range(20) for b in range(20)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2, 3) != derive_seed(1, 3, 2)
    assert derive_seed(1) != derive_seed(1, 0)


@pytest.mark.parametrize("base", [-1, 2**70])
def test_any_whole_number_is_a_base(base):
    assert 0 <= derive_seed(base, -3) < 2**63
