"""ASCEND_RT_VISIBLE_DEVICES: what CANN takes silently another way is refused."""

import pytest
from relax_npu import VisibleDevicesError, format_visible, logical_index, parse_visible


@pytest.mark.parametrize(("text", "ids"), [("", ()), ("0", (0,)), ("0,1", (0, 1)), ("2,3,15", (2, 3, 15))])
def test_plain_lists(text: str, ids: tuple[int, ...]) -> None:
    assert parse_visible(text) == ids


@pytest.mark.parametrize(
    ("text", "why", "meant"),
    [
        ("1,0", "do not ascend", "=0,1"),
        ("0, 1", "' 1' is not a device id", "=0,1"),
        (" ", "' ' is not a device id", None),
        ("0,0", "there twice", "=0"),
        ("0,1,", "'' is not a device id", "=0,1"),
        (",", "'' is not a device id", None),
        ("0-3", "'0-3' is not a device id", None),
        ("-1", "'-1' is not a device id", None),
        ("npu0", "'npu0' is not a device id", None),
        ("2,x,1", "'x' is not a device id", "=1,2"),
        ("\u0661", "is not a device id", None),
        ("1.0", "'1.0' is not a device id", None),
        ("9" * 5000, "is not a device id", None),
        ("00,1", "'00' is not a device id", "=0,1"),
    ],
)
def test_lists_that_cann_would_misread(text: str, why: str, meant: str | None) -> None:
    with pytest.raises(VisibleDevicesError) as told:
        parse_visible(text)
    assert why in str(told.value)
    assert (
        ("set ASCEND_RT_VISIBLE_DEVICES" + meant in str(told.value))
        if meant
        else ("set ASC" not in str(told.value))
    )


def test_written_lists_ascend() -> None:
    assert format_visible([7, 0, 11]) == "0,7,11"
    assert format_visible([]) == ""
    assert parse_visible(format_visible([3, 1])) == (1, 3)


@pytest.mark.parametrize("ids", [[0, 0], [-1]])
def test_ids_that_cannot_be_written(ids: list[int]) -> None:
    with pytest.raises(VisibleDevicesError, match="0 or greater, each once"):
        format_visible(ids)


def test_a_physical_id_becomes_its_place_among_the_visible() -> None:
    assert [logical_index(number, (4, 6, 7)) for number in (4, 6, 7)] == [0, 1, 2]
    with pytest.raises(VisibleDevicesError, match=r"NPU 0 is not visible .* sees \[4, 6, 7\]"):
        logical_index(0, (4, 6, 7))
