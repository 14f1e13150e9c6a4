"""How certain numbers are: intervals of means, percentiles."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """The interval that holds the mean of what the values are drawn from, by Student's t.

    Args:
        values: independent ones, such as one of each repetition.
        confidence: how often such an interval holds the mean.

    Returns:
        Both ends; None of fewer than two values, which say nothing of how they vary.
    """
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * stdev(values)
    half /= math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def is_narrow(values: Sequence[float], precision: float) -> bool:
    """Whether the mean is known to a share of itself, such as 0.05 up and down."""
    ends = mean_interval(values)
    return ends is not None and (ends[1] - ends[0]) / 2 <= precision * abs(fmean(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of all lies below, between two neighbours in proportion.

    Args:
        values: at least one, in any order.
        share: 0 for the smallest, 1 for the largest.
    """
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (place - below) * (ranked[above] - ranked[below])
