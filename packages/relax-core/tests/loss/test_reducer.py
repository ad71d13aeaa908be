import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relax_core.loss import LossReducer, LossTerm

numbers = st.floats(-5, 5, allow_nan=False, width=32)


@given(st.lists(st.tuples(numbers, st.integers(0, 2)), min_size=1, max_size=40), st.data())
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(tokens, data):
    values = torch.tensor([v for v, _ in tokens], dtype=torch.float64)
    weights = torch.tensor([w for _, w in tokens], dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    reducer = LossReducer({"policy": float(weights.sum())})

    losses = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        # An empty micro-batch and padding of any value must not matter.
        padding_T = torch.full((3,), float("nan"), dtype=torch.float64)
        value_T = torch.cat([values[start:end] * scale, padding_T])
        weight_T = torch.cat([weights[start:end], torch.zeros(3, dtype=torch.float64)])
        losses.append(reducer.reduce([LossTerm("policy", value_T, weight_T)])[0])
    total = torch.stack(losses).sum()
    total.backward()

    mean = float((values * weights).sum()) / max(float(weights.sum()), 1)
    assert float(total.detach()) == pytest.approx(1.5 * mean, rel=1e-12, abs=1e-12)
    assert float(scale.grad) == pytest.approx(mean, rel=1e-12, abs=1e-12)


def test_terms_have_their_own_denominators_and_coefficients():
    ones = torch.ones(4)
    loss, shares = LossReducer({"policy": 4, "mtp_0": 2}).reduce(
        [
            LossTerm("policy", 3 * ones, ones),
            LossTerm("mtp_0", ones, torch.tensor([1.0, 0, 0, 1]), coefficient=0.1),
        ]
    )
    assert float(loss) == pytest.approx(3 + 0.1)
    assert {name: float(share) for name, share in shares.items()} == {"policy": 3.0, "mtp_0": 1.0}


def test_a_term_that_counts_nowhere_has_a_gradient_of_exactly_zero():
    value = torch.ones(2, requires_grad=True)
    loss, _ = LossReducer({"policy": 0}).reduce([LossTerm("policy", value, torch.zeros(2))])
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert value.grad.tolist() == [0.0, 0.0]


def test_a_term_without_denominator_is_named():
    with pytest.raises(ValueError, match=r"'kl' has no denominator; known: \['policy'\]"):
        LossReducer({"policy": 1}).reduce([LossTerm("kl", torch.ones(1), torch.ones(1))])
    with pytest.raises(ValueError, match="nothing to train on"):
        LossReducer({"kl": 1}).reduce([LossTerm("kl", torch.ones(1), torch.ones(1), coefficient=0)])
