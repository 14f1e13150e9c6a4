"""Whether two results differ: ``better``, ``worse`` or ``noise``.

A difference counts when it is larger than a bound and would be rare by chance: the rank test of
Mann and Whitney (1947), exact, one-sided in the direction of the difference, at most 5 %. It takes
one number of each repetition, since only repetitions are independent; with three on each side every
one of the one must lie beyond every one of the other. Fewer on either side are noise: one number
beyond twenty others may be an outlier.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from moe_runtime.benchmarks.suite.measured_work import require_same_work
from moe_runtime.benchmarks.suite.runner import MeasuredSystem

_MOST_EXACT = 100
_CHANCE = 0.05
_FEWEST = 3
_MOST = 1e9


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One metric of one system in two results.

    Attributes:
        system, metric, unit: what was compared.
        before, after: medians over repetitions.
        change: ``after`` over ``before``, less one; 0 where both are 0.
        chance: how often so clear an order of the repetitions comes by chance.
        word: ``better``, ``worse`` or ``noise``.
    """

    system: str
    metric: str
    unit: str
    before: float
    after: float
    change: float
    chance: float
    word: str


def judge(
    before: Sequence[float], after: Sequence[float], *, bound: float, is_less_better: bool
) -> tuple[str, float, float]:
    """Compares repetitions.

    Args:
        before: a number of each repetition, at least one.
        after: the same of the other results.
        bound: differences of medians up to this share are noise.
        is_less_better: as for times; not as for speeds.

    Returns:
        The word, the change as a share, the chance.
    """
    from scipy.stats import mannwhitneyu

    was, now = median(before), median(after)
    change = min(now / was - 1, _MOST) if was else float(now != was)
    grew = now > was
    # Exact chances of hundreds of requests take minutes, and are those of a normal distribution.
    method = "exact" if max(len(before), len(after)) <= _MOST_EXACT else "asymptotic"
    tested = mannwhitneyu(after, before, alternative="greater" if grew else "less", method=method)
    chance = float(tested.pvalue)
    is_enough = min(len(before), len(after)) >= _FEWEST
    if abs(change) <= bound or chance > _CHANCE or not is_enough:
        return "noise", change, chance
    return "worse" if grew == is_less_better else "better", change, chance


def compare(before: dict[str, Any], after: dict[str, Any], bound: float) -> list[Verdict]:
    """Judges every judged metric of every system that both results have numbers of.

    Args:
        before: content of a results file.
        after: of another, of the same work.
        bound: differences up to this share are noise.

    Raises:
        ValueError: what was measured differs, or no system has numbers in both.
    """
    if before["case"] != after["case"]:
        raise ValueError(
            f"expected results of one case, got {before['case']!r} and {after['case']!r}"
        )
    require_same_work(before, after)
    found = list(_verdicts(before, after, bound))
    if not found:
        names = [
            {one["system"] for one in each["measurements"] if one["summary"]}
            for each in (before, after)
        ]
        raise ValueError(
            "no system has numbers in both results: "
            f"{', '.join(sorted(names[0])) or 'none'} before, "
            f"{', '.join(sorted(names[1])) or 'none'} after"
        )
    return found


def lost_systems(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str | None]:
    """Systems with numbers before and none after, by name: why; None where it was not asked for."""
    others = {one["system"]: one for one in after["measurements"]}
    lost = {}
    for one in before["measurements"]:
        other = others.get(one["system"], {"summary": {}, "failure": None})
        if one["summary"] and not other["summary"]:
            lost[one["system"]] = other["failure"]
    return lost


def differing_settings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What else differs between two results, a line for each: machine, then settings."""
    lines = []
    for part in ("machine", "settings"):
        one, other = before[part], after[part]
        lines += [
            f"{part}: {name}: {one.get(name)!r} before, {other.get(name)!r} after"
            for name in sorted(one.keys() | other.keys())
            if one.get(name) != other.get(name)
        ]
    return lines


def _verdicts(before: dict[str, Any], after: dict[str, Any], bound: float) -> Iterator[Verdict]:
    others = {one["system"]: one for one in after["measurements"]}
    for one in before["measurements"]:
        other = others.get(one["system"], {"summary": {}})
        for metric, meant in one["summary"].items():
            if metric not in other["summary"] or not meant["judged"]:
                continue
            was, now = (
                MeasuredSystem(repetitions=each["repetitions"]).values(metric)
                for each in (one, other)
            )
            if not was or not now:
                continue
            word, change, chance = judge(
                was, now, bound=bound, is_less_better=meant["better"] == "less"
            )
            yield Verdict(
                system=one["system"],
                metric=metric,
                unit=meant["unit"],
                before=median(was),
                after=median(now),
                change=change,
                chance=chance,
                word=word,
            )
