"""Figures in a paragraph that names a results file are in that file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`benchmarks/results/([\w.-]+\.json)`")
DECIMAL = re.compile(r"(?<![\w.,-])(\d+\.\d+)(?![\d.,]*\d)")


def measured(name: str) -> list[dict[str, Any]]:
    """The systems of a results file."""
    text = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")
    return json.loads(text)["measurements"]


def is_kept(figure: str, values: set[float]) -> bool:
    """Whether a value, rounded as the figure is, is the figure."""
    decimals = len(figure.partition(".")[2])
    return any(f"{value:.{decimals}f}" == figure for value in values)


def numbers_of(results: Any) -> Iterator[float]:
    """All that a results file has."""
    if isinstance(results, dict):
        results = [*results.values()]
    if isinstance(results, list):
        for part in results:
            yield from numbers_of(part)
    elif isinstance(results, int | float):
        yield float(results)


def test_decimals_of_a_paragraph_are_numbers_of_the_files_that_it_names():
    """Seconds may be given in milliseconds, bytes in MB."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    for page in pages:
        require_kept(page)


def require_kept(page: Path) -> None:
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|] ?)", page.read_text(encoding="utf-8")):
        files = [ROOT / "benchmarks" / "results" / name for name in NAMED.findall(paragraph)]
        if files:
            found = {v for file in files for v in numbers_of(json.loads(file.read_text()))}
            values = {value * scale for value in found for scale in (1.0, 1e3, 1e-6)}
            gone = [one for one in DECIMAL.findall(paragraph) if not is_kept(one, values)]
            assert gone == [], page.name


def test_wrong_figures_are_found():
    assert is_kept("5.0", {4.952})
    assert not is_kept("5.0", {4.9})


def test_gpt_oss_beside_llama_cpp_is_told_with_its_spread_and_again():
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    names = [f"latency-gpt-oss-20b-{run}-amd-epyc-2c-24g.json" for run in ("none", "again")]
    (told,) = (
        part for part in page.split("\n\n") if part.startswith("gpt-oss-20b's shape in MXFP4")
    )
    order = ("moe_runtime", "llama_cpp", "moe_runtime:planes", "moe_runtime:int8")
    middles, spread = [], []
    for name in names:
        assert name in told
        found = {one["system"]: one for one in measured(name)}
        middles.append([found[system]["summary"]["between_tokens_s"]["p50"] for system in order])
        medians = [
            [median(one["between_tokens_s"]) for one in found[system]["repetitions"]]
            for system in order[:2]
        ]
        spread.append([bound for each in medians for bound in (min(each), max(each))])
    expected = [f"{1e3 * seconds:.1f}" for seconds in (*middles[0], *spread[0], *middles[1])]
    assert re.findall(r"\d+\.\d\b", told) == expected
    assert all(planes < llama for _, llama, planes, _ in middles)


def test_why_lru_is_the_beginning_is_what_its_files_say():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    (told,) = (part for part in page.split("\n\n") if part.startswith("Neither LRU nor"))
    found = {
        (name, one["system"], share): one["summary"][f"hit_rate_at_{share}"]["median"]
        for name in ("aging", "drifting")
        for one in measured(f"bench-policies-{name}-amd-epyc-2c-24g.json")
        for share in ("0.25", "0.5")
    }
    expected = [
        100 * found[name, policy, share]
        for name in ("aging", "drifting")
        for share in ("0.25", "0.5")
        for policy in ("lfu-aging", "lru")
    ]
    assert re.findall(r"\d+\.\d\d(?= %)", told) == [f"{rate:.2f}" for rate in expected]
    assert expected[0] > expected[1]
    assert expected[4] < expected[5]


def test_the_tables_of_policies_are_those_of_their_files():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")

    def rates(name: str, system: str, metrics: list[str]) -> list[str]:
        file = f"{name}-amd-epyc-2c-24g.json"
        (one,) = (one for one in measured(file) if one["system"] == system)
        return [f"{100 * one['summary'][metric]['median']:.1f} %" for metric in metrics]

    told = re.findall(
        r"^\| (?:`([\w-]+)`[^|]*|(optimum)) \| ([^|]* %) \| ([^|]* %) \|$", page, flags=re.M
    )
    assert len(told) == 6
    for policy, optimum, *cells in told:
        system = "belady-bypass" if optimum else policy
        names = ("bench-policies-told", "bench-policies-told-reset")
        assert cells == [rates(name, system, ["hit_rate_at_0.25"])[0] for name in names]
    shown = re.findall(
        r"^\| `([\w-]+)`[^|]* \| ([^|]* %) \| (.* %) \| (.* %) \|$", page, flags=re.M
    )
    assert "random" in dict(row[:2] for row in shown)
    for policy, *cells in shown:
        metrics = [f"hit_rate_at_{share}" for share in ("0.125", "0.25", "0.5")]
        (one,) = (
            one
            for one in measured("bench-policies-amd-epyc-avx2-2c-24g.json")
            if one["system"] == policy
        )
        assert cells == [f"{100 * one['summary'][metric]['median']:.1f} %" for metric in metrics]
    rows = re.findall(r"^\| (\d+) % \| (\d+) \| (.*) \|$", page, flags=re.MULTILINE)
    assert len(rows) == 8
    for percent, group, rest in rows:
        share, beside = f"{int(percent) / 100:g}", f"side-by-side-{group}"
        policies = ("lru", "activation-aware", "belady-bypass")
        expected = [
            rates(f"bench-policies-{beside}", policy, [f"hit_rate_at_{share}"])[0]
            for policy in policies
        ]
        if group != "8":
            metrics = ("useful_prefetches", "reads_of_lru", "waits_of_lru")
            asked = [f"{metric}_at_{share}" for metric in metrics]
            expected += rates(f"bench-predictors-{beside}", "eam", asked)
        assert rest.split(" | ") == expected + ["–"] * (6 - len(expected))
