"""Compare two results files: do they measure the same work, and do they differ?

A difference counts if it exceeds a bound and the one-sided exact rank test of Mann and Whitney
(1947) gives at most 5 %. The test takes one number per repetition; fewer than three on either side
count as noise. The settings in ``_SETTINGS`` define the work; all others may differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from moe_runtime.benchmarks.suite import MeasuredSystem
from moe_runtime.config import format_bytes

_LAYER = ("experts", "num_experts", "top_k", "dim_model", "dim_hidden", "dtype", "device")
_TEXT = (*("model", "layers", "weights", "prompt_tokens", "new_tokens"), "followed_by", "device")
_TEXT += ("routing",)
_TRACE = ("model", "tokens", "layers", "experts", "top_k")
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "latency": _TEXT,
    "throughput": (*_TEXT, "batch"),
    "quality": ("model", "text", "text_digest", "chunks", "context", "steps", "device"),
    "io": ("model", "expert_bytes", "experts"),
    "experts": (*_LAYER, "memory"),
    "layer": _LAYER,
    "ops": _LAYER,
    "training": (*_LAYER, "layers", "sequences", "context"),
    "ablation": (
        *("model", "steps", "sequences", "context", "device"),
        *("configuration", "seeds", "variants"),
    ),
    "policies": (*_TRACE, "scope", "side_by_side", "expert_size", "predictor", "train"),
    "predictors": (*_TRACE, "train", "test_share", "seed", "max_tokens", "side_by_side", "link"),
    "placements": (
        *(*_TRACE, "fit", "devices", "nodes", "replicas"),
        *("groups", "load_slack", "aligned", "time_limit_s"),
    ),
    "dispatch": ("ranks", "tokens", "dim", "experts", "top_k"),
    "kernels": ("dtype",),
    "device-decode": _TEXT,
    "device-training": ("model", "layers", "sequences", "context"),
    "serve": ("model", "prompt_tokens", "output_tokens", "chat", "ignore_eos"),
}
"""The settings that define the work, by case. Other token counts are metrics."""
_UNSAID = ("configuration", "seeds", "variants", "aligned", "load_slack", "time_limit_s")
"""Settings that are compared but left out of headings."""
_VALUES_ALONE = ("model", "text", "dtype", "scope")
"""Settings whose values need no name in a heading."""
_CPU = "the CPU"
_MOST_EXACT = 100  # exact tests of hundreds of requests take minutes
_CHANCE, _FEWEST, _MOST = 0.05, 3, 1e9


def work_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that define the work of a results file. Lists are deduplicated and sorted."""
    settings = results["settings"]
    found = {name: settings.get(name) for name in _SETTINGS.get(results["case"], ())}
    if "device" in found:  # the machine says which GPU
        is_on_cpu = str(found["device"] or "cpu").partition(":")[0] == "cpu"
        found["device"] = _CPU if is_on_cpu else "a GPU"
    for name, value in found.items():
        if isinstance(value, list):
            by_text = {repr(one): one for one in value}
            found[name] = [by_text[t] for t in sorted(by_text, key=lambda text: (len(text), text))]
    return found


def heading_words(results: Mapping[str, Any]) -> str:
    """The work and the memory cap in one line. All numbers under one heading share both."""
    settings, words = results["settings"], list[str]()
    named = work_of(results) | {"cap": settings.get("cap_bytes")}
    for name, value in named.items():
        if name in _UNSAID or value in (None, False, [], _CPU):
            continue
        shown = " and ".join(map(str, value)) if isinstance(value, list) else str(value)
        if name == "layers" and settings.get("layers_of_shape", value) != value:
            shown += f" of {settings['layers_of_shape']}"
        if name in ("cap", "memory") and isinstance(value, int) and 0 <= value < 1 << 63:
            shown = format_bytes(value)  # edited files may hold anything
        plain = "on" if name == "device" else name.replace("_", " ")
        words.append(
            plain if value is True else shown if name in _VALUES_ALONE else f"{plain} {shown}"
        )
    return ", ".join(words)


def require_same_work(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the results measure different work."""
    one, other = work_of(before), work_of(after)
    differing = [
        _difference(name, one[name], other[name]) for name in one if one[name] != other[name]
    ]
    if differing:
        raise ValueError(
            f"expected results of the same work, got {'; '.join(differing)}; measure one of them "
            "again, or lay them out with `bench report`, which keeps them apart"
        )


def _difference(name: str, one: Any, other: Any) -> str:
    """The differing value; for tables, the first differing key."""
    while isinstance(one, Mapping) and isinstance(other, Mapping):
        key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
        name, one, other = f"{name}.{key}", one.get(key), other.get(key)
    return f"{name} {one!r} before, {other!r} after"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One metric of one system in two results: medians, relative change and p-value."""

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
    """Compare repetitions; return the word, the change and the p-value of a `Verdict`."""
    from scipy.stats import mannwhitneyu

    was, now = median(before), median(after)
    change = min(now / was - 1, _MOST) if was else float(now != was)
    grew = now > was
    method = "exact" if max(len(before), len(after)) <= _MOST_EXACT else "asymptotic"
    tested = mannwhitneyu(after, before, alternative="greater" if grew else "less", method=method)
    chance = float(tested.pvalue)
    is_enough = min(len(before), len(after)) >= _FEWEST
    if abs(change) <= bound or chance > _CHANCE or not is_enough:
        return "noise", change, chance
    return "worse" if grew == is_less_better else "better", change, chance


def compare(before: dict[str, Any], after: dict[str, Any], bound: float) -> list[Verdict]:
    """Judge every judged metric of every system that has numbers in both results.

    Raises:
        ValueError: the work differs, or no system has numbers in both.
    """
    if before["case"] != after["case"]:
        raise ValueError(
            f"expected results of one case, got {before['case']!r} and {after['case']!r}"
        )
    require_same_work(before, after)
    found = list(_verdicts(before, after, bound))
    if not found:
        names = [
            ", ".join(sorted(one["system"] for one in each["measurements"] if one["summary"]))
            or "none"
            for each in (before, after)
        ]
        told = f"{names[0]} before, {names[1]} after"
        raise ValueError(f"no system has numbers in both results: {told}")
    return found


def lost_systems(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str | None]:
    """Systems with numbers before and none after, with the reason (None if not measured)."""
    others = {one["system"]: one for one in after["measurements"]}
    lost = {}
    for one in before["measurements"]:
        other = others.get(one["system"], {"summary": {}, "failure": None})
        if one["summary"] and not other["summary"]:
            lost[one["system"]] = other["failure"]
    return lost


def differing_settings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Other differences between two results, one line each: machine, then settings."""
    return [
        f"{part}: {name}: {before[part].get(name)!r} before, {after[part].get(name)!r} after"
        for part in ("machine", "settings")
        for name in sorted(before[part].keys() | after[part].keys())
        if before[part].get(name) != after[part].get(name)
    ]


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
            if was and now:
                is_less_better = meant["better"] == "less"
                judged = judge(was, now, bound=bound, is_less_better=is_less_better)
                word, change, chance = judged
                numbers: dict[str, Any] = {
                    "before": median(was),
                    "after": median(now),
                    "change": change,
                }
                named = {"system": one["system"], "metric": metric, "unit": meant["unit"]}
                yield Verdict(**named, **numbers, chance=chance, word=word)
