import pytest
from pydantic import ValidationError
from relax_core.device import ParallelConfig


def test_axes_that_need_another_are_refused():
    with pytest.raises(ValidationError, match="set tensor to 2 or more, or sequence to false"):
        ParallelConfig(sequence=True)
    with pytest.raises(ValidationError, match="set pipeline to 2 or more, or pipeline_chunks to 1"):
        ParallelConfig(pipeline_chunks=2)


@pytest.mark.parametrize(
    ("sizes", "multiple"),
    [
        ({}, 1),
        ({"tensor": 4}, 1),
        ({"tensor": 4, "sequence": True}, 4),
        ({"context": 3}, 6),
        ({"context": 2, "tensor": 2, "sequence": True}, 8),
    ],
)
def test_rows_divide_by_what_shares_them(sizes, multiple):
    assert ParallelConfig(**sizes).row_multiple == multiple
