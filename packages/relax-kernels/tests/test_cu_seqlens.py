import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_kernels import CuSeqlens, InvalidInput, attention

lengths_strategy = st.lists(st.integers(0, 40), max_size=12)


def test_by_hand() -> None:
    cu = CuSeqlens.from_lengths((3, 0, 2))
    assert cu.host == (0, 3, 3, 5)
    assert cu.lengths == (3, 0, 2)
    assert (len(cu), cu.total, cu.max_length) == (3, 5, 3)
    assert cu.segment_ids("cpu").tolist() == [0, 0, 0, 2, 2]
    assert cu.positions("cpu").tolist() == [0, 1, 2, 0, 1]
    assert repr(cu) == "CuSeqlens(lengths=(3, 0, 2))"


@settings(deadline=None)
@given(lengths_strategy)
def test_offsets_and_lengths_say_the_same(lengths: list[int]) -> None:
    cu = CuSeqlens.from_lengths(lengths)
    assert cu == CuSeqlens(cu.host)
    assert hash(cu) == hash(CuSeqlens(cu.host))
    assert cu.lengths == tuple(lengths)
    assert cu.total == sum(lengths)
    assert cu.on("cpu").tolist() == list(cu.host)
    for token, (segment, place) in enumerate(zip(cu.segment_ids("cpu"), cu.positions("cpu"), strict=True)):
        assert cu.host[segment] + place == token
        assert place < cu.lengths[segment]


def test_device_copies_are_made_once() -> None:
    cu = CuSeqlens.from_lengths((3, 2))
    assert cu.on("cpu") is cu.on(torch.device("cpu"))
    assert cu.on("cpu").dtype == torch.int32
    made = []
    for _ in range(2):
        cu.table(("mine", 4), lambda: made.append(1))
    assert made == [1]


def test_a_copy_elsewhere_has_the_lengths_and_no_tables() -> None:
    cu = CuSeqlens.from_lengths((3, 2))
    cu.table(("cannot be pickled",), lambda: lambda: None)
    assert pickle.loads(pickle.dumps(cu)) == cu


def test_bad_lengths_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"must start with 0, given \(1, 3\)"):
        CuSeqlens((1, 3))
    with pytest.raises(InvalidInput, match=r"must start with 0, given \(\)"):
        CuSeqlens(())
    with pytest.raises(InvalidInput, match=r"must not decrease, given \(0, 5, 3\)"):
        CuSeqlens((0, 5, 3))
    with pytest.raises(InvalidInput, match=r"must not be negative, given \(4, -1\)"):
        CuSeqlens.from_lengths((4, -1))


@pytest.mark.parametrize(
    "lengths", [(3.7, 2), "37", ("3",), 5, (None,), torch.tensor([2.5]), torch.tensor([[2, 3]])]
)
def test_lengths_that_are_not_whole_numbers_are_refused(lengths) -> None:
    with pytest.raises(InvalidInput, match="lengths must be whole numbers, given "):
        CuSeqlens.from_lengths(lengths)


def test_more_tokens_than_int32_can_count_are_refused() -> None:
    assert CuSeqlens.from_lengths((2**31 - 1,)).on("cpu").tolist() == [0, 2**31 - 1]
    with pytest.raises(InvalidInput, match="2147483648 tokens are too many"):
        CuSeqlens.from_lengths((2**30, 2**30))


def test_tables_first_made_for_inference_serve_training() -> None:
    cu = CuSeqlens.from_lengths((2, 1))
    with torch.inference_mode():
        cu.segment_ids("cpu")
    x = torch.ones(2, requires_grad=True)
    (x[cu.segment_ids("cpu")] ** 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 2.0]


def test_tables_die_with_their_lengths() -> None:
    """Without waiting for the collector of cycles: tables hold memory of devices."""
    cu, x = CuSeqlens.from_lengths((4, 3)), torch.zeros(7, 2, 8)
    attention(x, x, x, cu_seqlens_q=cu, backend="torch")
    (tiles,) = cu._tables.values()
    kept = weakref.ref(tiles[0])
    del tiles
    gc.disable()
    try:
        del cu
        assert kept() is None
    finally:
        gc.enable()
