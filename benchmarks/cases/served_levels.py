"""What clients of a server waited for, as results of the case ``serve``.

A level, so many clients or requests a second, is a system, and each answered request one of its
repetitions; what concerns a level as a whole, such as its tokens a second, is one more. Requests of
a level are not independent, so an interval of theirs says less than one of repetitions elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moe_runtime.benchmarks.load.client import TimedAnswer
from moe_runtime.benchmarks.load.generator import Level, MeasuredLevel
from moe_runtime.benchmarks.load.summary import summarize
from moe_runtime.benchmarks.suite.results import (
    JOULES,
    Metric,
    describe_system,
    make_results,
    versions,
)
from moe_runtime.benchmarks.suite.runner import MeasuredSystem, Number

METRICS = {
    "time_to_first_token_s": Metric("s"),
    "inter_token_s": Metric("s"),
    "time_per_output_token_s": Metric("s", is_judged=False),
    "end_to_end_s": Metric("s"),
    "sent_s": Metric("s", is_judged=False),
    "prompt_tokens": Metric("count", is_judged=False),
    "output_tokens": Metric("count", is_judged=False),
    "output_tokens_per_s": Metric("tokens/s", better="more", is_judged=False),
    "requests_per_s": Metric("requests/s", better="more", is_judged=False),
    "within_bounds": Metric("share", better="more", is_judged=False),
    "seconds": Metric("s", is_judged=False),
    "failed": Metric("count", is_judged=False),
    "unfinished": Metric("count", is_judged=False),
    "read_call_bytes": Metric("bytes", is_judged=False),
    "storage_bytes": Metric("bytes", is_judged=False),
    "peak_rss_bytes": Metric("bytes"),
    **JOULES,
}


def name_of(level: Level) -> str:
    """What a level is called in tables and files."""
    if level.concurrency is None:
        return f"{level.rate:g} requests/s"
    return f"{level.concurrency} at a time"


def serve_results(
    found: Sequence[MeasuredLevel],
    bounds: Mapping[str, float],
    *,
    settings: Mapping[str, Any],
    is_interrupted: bool,
) -> dict[str, Any]:
    """The content of a results file.

    Args:
        found: the levels.
        bounds: of a request that counts as good, as for ``summarize``.
        settings: what was asked for; no keys.
        is_interrupted: whether a signal ended it.
    """
    rows = [(one, summarize(one, bounds)) for one in found]
    has_answers = any(row["answered"] for _, row in rows)
    ended = "interrupted" if is_interrupted else "most" if has_answers else "failed"
    return make_results(
        "serve",
        settings,
        ended,
        [
            describe_system(
                name_of(one.level),
                _measured(one, row),
                METRICS,
                system_versions=versions(),
                quality=None,
            )
            for one, row in rows
        ],
    )


def _measured(one: MeasuredLevel, row: Mapping[str, Any]) -> MeasuredSystem:
    good = [answer for answer in one.answers if answer.error is None]
    if not good:
        said = [f"{what['count']} failed: {what['first']}" for what in row["errors"].values()]
        return MeasuredSystem(failure="; ".join(said) or "no request was answered")
    names = ("output_tokens_per_s", "requests_per_s", "seconds", "failed", "unfinished")
    whole: dict[str, Number] = {name: row[name] for name in names if row[name] is not None}
    if "goodput" in row:
        whole["within_bounds"] = row["goodput"]["share"]
    whole |= one.counts
    return MeasuredSystem(repetitions=[*(_numbers(answer, one.began_s) for answer in good), whole])


def _numbers(answer: TimedAnswer, began_s: float) -> dict[str, Number]:
    found: dict[str, Number] = {
        "sent_s": answer.sent_s - began_s,
        "end_to_end_s": answer.whole_s,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
    }
    if answer.pieces_s:
        found["time_to_first_token_s"] = answer.first_token_s
    if answer.gaps_s:
        found["inter_token_s"] = answer.gaps_s
    if answer.per_token_s is not None:
        found["time_per_output_token_s"] = answer.per_token_s
    return found
