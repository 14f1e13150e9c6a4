"""Format numbers for people: a suitable unit, and only the digits that are certain."""

import math
import re
from collections.abc import Iterable
from typing import Any

_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_UNITS = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "bytes": _BYTES,
    "bytes/s": tuple((size, f"{name}/s") for size, name in _BYTES),
}
_MOST_DIGITS = 6


def unit_for(unit: str, values: Iterable[float]) -> tuple[float, str]:
    """The factor and the unit in which to show numbers."""
    units = _UNITS.get(unit, ((1.0, unit),))
    largest = max(map(abs, values), default=0.0) or 1.0
    size, name = next((one for one in units if largest >= one[0]), units[-1])
    return 1 / size, name


def metric_words(metric: str) -> str:
    """A metric's name as a heading, without its unit."""
    return re.sub(r"(_per)?_(s|bytes|joules)$", "", metric).replace("_", " ")


def figure(value: float) -> str:
    """A number with four digits, or all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def with_half(summary: dict[str, Any], factor: float) -> str:
    """The mean and half of its confidence interval, rounded to the certain digits."""
    mean = summary["mean"] * factor
    half = 0.0 if summary["low"] is None else (summary["high"] - summary["low"]) / 2 * factor
    decimals = min(1 - _magnitude(half), _MOST_DIGITS - 1 - _magnitude(mean))
    if not round(half, decimals):
        return figure(mean)
    shown = max(0, decimals)
    return f"{round(mean, decimals):.{shown}f} ± {round(half, decimals):.{shown}f}"


def _magnitude(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0
