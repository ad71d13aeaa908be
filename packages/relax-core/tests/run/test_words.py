import pytest
from relax_core.run.words import duration, number, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.53125, "0.5312"),
        (3, "3"),
        (0.0, "0"),
        (1e-6, "1.0e-06"),
        (123.456, "123.5"),
        (9999, "9999"),
        (12345, "12.3K"),
        (-2_500_000, "-2.5M"),
        (3e9, "3.0G"),
        (3e20, "3.0e+20"),
        (float("nan"), "nan"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (42, "42 s"), (187, "3:07"), (3723, "1:02:03"), (59.7, "1:00")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_sparklines():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 4, 4], 2) == "▁█"
    assert sparkline([5, 5], 10) == "▁▁"
    assert sparkline([1, float("nan"), 2], 10) == "▁█"
    assert sparkline([], 10) == ""
