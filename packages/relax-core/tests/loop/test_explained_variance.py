"""How much of the returns a critic explains."""

import pytest
import torch
from relax_core.loop.values import explained_variance
from relax_core.trainer.sample import Sample


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("targets", "values", "explained"),
    [([1, 2, 3, 4], [1, 2, 3, 6], 1 - 0.75 / 1.25), ([2, 2, 2, 2], [1, 2, 3, 4], 0), (None, [1, 2, 3, 4], 0)],
    ids=["spread", "equal", "every completion cut"],
)
def test_it_is_a_number_whatever_the_targets(targets, values, explained):
    mask = torch.tensor([0.0] + [0.0 if targets is None else 1.0] * 4)
    columns = {
        "value_target": torch.tensor([9.0, *(targets or values)]),
        "value": torch.tensor([0.0, *values]),
    }
    sample = Sample(torch.arange(5), mask, columns=columns)
    assert explained_variance([sample]) == pytest.approx(explained)
