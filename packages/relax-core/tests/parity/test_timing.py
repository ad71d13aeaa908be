"""What layouts are timed on is the same training in each."""

import pytest
from relax_core.testing import Row

# Sums in another order, as in `test_layouts`.
REL = 2e-4
LAYOUTS = (
    Row("tp2-sp", 2, {"tensor": 2, "sequence": True}),
    Row("pp2", 2, {"pipeline": 2}),
    Row("moe-ep2", 2, {"expert": 2}, family="moe"),
)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in LAYOUTS])
def test_a_timed_layout_starts_from_the_weights_and_the_batch_of_one_rank(pools, row):
    job = {"samples": 2, "tokens": 32, "warmup": 1, "steps": 1}
    one, two = (pools(each.ranks).run(each, "time", **job) for each in (row.reference, row))
    for name in ("loss", "grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=REL)
    assert two["ms"] > 0
