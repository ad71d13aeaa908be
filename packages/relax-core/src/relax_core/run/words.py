"""Numbers, durations and small charts as text."""

import math
from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"


def number(value: float) -> str:
    """Four significant digits, and K, M or G for large counts: `0.5312`, `12.3K`, `1.2e-06`, `3.0e+20`."""
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e12:
        return f"{value:.1e}"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "K")):
        if abs(value) >= limit:
            scaled = value / {"G": 1e9, "M": 1e6, "K": 1e3}[letter]
            return f"{scaled:.1f}{letter}"
    if value == int(value):
        return str(int(value))
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def duration(seconds: float) -> str:
    """`42 s`, `3:07` or `1:02:03`."""
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minutes}:{second:02}" if minutes else f"{second} s"


def sparkline(values: Sequence[float], width: int) -> str:
    """A row of bars, the lowest value lowest; a long series is averaged into `width` parts."""
    finite = [float(value) for value in values if math.isfinite(float(value))]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    edges = [round(i * len(finite) / count) for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / span * len(_BARS)))] for mean in means)
