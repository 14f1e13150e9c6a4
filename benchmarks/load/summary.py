"""What a level's answers say: percentiles, rates, failures, and the share that was quick enough."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_runtime.benchmarks.load.client import TimedAnswer
from moe_runtime.benchmarks.load.generator import MeasuredLevel
from moe_runtime.config import nearest

_PERCENTILES = (50, 90, 99)
_UNITS = {"ms": 1e-3, "s": 1.0}
_BOUNDED = ("ttft", "itl", "e2e")


def parse_goodput(text: str) -> dict[str, float]:
    """Reads bounds such as ``ttft=200ms,itl=50ms,e2e=2s``, in seconds.

    Raises:
        ValueError: a part is no bound, is unknown, or comes twice.
    """
    bounds: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)=([0-9]*\.?[0-9]+)(ms|s)\s*", part)
        if found is None or not float(found[2]):
            raise ValueError(
                f"--goodput must be bounds such as ttft=200ms,itl=50ms,e2e=2s, got {part!r}"
            )
        name = found[1]
        if name not in _BOUNDED:
            raise ValueError(f"--goodput: unknown bound {name!r}; {nearest(name, _BOUNDED)}")
        if name in bounds:
            raise ValueError(f"--goodput has {name} twice; give one bound for it")
        bounds[name] = float(found[2]) * _UNITS[found[3]]
    return bounds


def summarize(measured: MeasuredLevel, bounds: Mapping[str, float]) -> dict[str, Any]:
    """A level as a JSON object; lengths of time are in seconds.

    Args:
        measured: the level.
        bounds: of `parse_goodput`; a request within all of them counts as good.
    """
    good = [answer for answer in measured.answers if answer.error is None]
    seconds = measured.seconds
    tokens_in = sum(answer.prompt_tokens for answer in good)
    tokens_out = sum(answer.output_tokens for answer in good)
    per_token = [answer.per_token_s for answer in good]
    row: dict[str, Any] = {
        **measured.level._asdict(),
        "requests": measured.num_requests,
        "answered": len(good),
        "failed": len(measured.answers) - len(good),
        "unfinished": measured.num_requests - len(measured.answers),
        "errors": errors_by_kind(measured.answers),
        "seconds": seconds,
        "requests_per_s": _rate(len(good), seconds),
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "input_tokens_per_s": _rate(tokens_in, seconds),
        "output_tokens_per_s": _rate(tokens_out, seconds),
        "total_tokens_per_s": _rate(tokens_in + tokens_out, seconds),
        "are_tokens_counted": all(answer.is_counted for answer in good),
        "time_to_first_token_s": spread(answer.first_token_s for answer in good),
        "inter_token_s": spread(gap for answer in good for gap in answer.gaps_s),
        "time_per_output_token_s": spread(value for value in per_token if value is not None),
        "end_to_end_s": spread(answer.whole_s for answer in good),
        **measured.counts,
    }
    if bounds:
        within = sum(_is_within(answer, bounds) for answer in good)
        row["goodput"] = {
            "bounds_s": dict(bounds),
            "requests": within,
            "share": within / len(measured.answers) if measured.answers else None,
            "requests_per_s": _rate(within, seconds),
        }
    return row


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles, between two values by a straight line; None where there are none."""
    found = np.fromiter(values, np.float64)
    if not found.size:
        return None
    percentiles = np.percentile(found, _PERCENTILES)
    return {"mean": float(found.mean())} | {
        f"p{percent}": float(value)
        for percent, value in zip(_PERCENTILES, percentiles, strict=True)
    }


def errors_by_kind(answers: Sequence[TimedAnswer]) -> dict[str, dict[str, Any]]:
    """How many failures of each kind there were, and what the first one said."""
    kinds: dict[str, dict[str, Any]] = {}
    for answer in answers:
        if answer.error is not None:
            kind = kinds.setdefault(answer.error, {"count": 0, "first": answer.message})
            kind["count"] += 1
    return kinds


def _is_within(answer: TimedAnswer, bounds: Mapping[str, float]) -> bool:
    per_token_s = answer.per_token_s
    took = {"ttft": answer.first_token_s, "itl": per_token_s or 0.0, "e2e": answer.whole_s}
    return all(took[name] <= bound for name, bound in bounds.items())


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
