"""Figures beside the name of a results file on a page are in that file."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLI = ROOT / "docs" / "cli.md"
PAGE = CLI.read_text(encoding="utf-8")
NAMED = re.compile(r"`benchmarks/results/([\w.-]+\.json)`")
# As measured, in ms, in GB, and as a share in percent.
SCALES = (1.0, 1e3, 1e-9, 100.0)
# Decimals, and whole numbers of three digits that are no size and no count of something given.
GIVEN = r" [KMG]iB| tokens(?!/s)| of \d"
DECIMAL = re.compile(r"(?<![\w.,-])(\d+\.\d+)(?![\d.,]*\d)")
FIGURE = re.compile(rf"(?<![\w.,-])(?<! of )(\d+\.\d+|\d{{3,}})(?![\d.,]*\d)(?!{GIVEN})")


def measured(name: str) -> list[dict[str, Any]]:
    """The systems of a results file."""
    text = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")
    return json.loads(text)["measurements"]


def passages() -> list[tuple[str, str]]:
    """Results files that are named, and the text up to the next blank line."""
    found = [(match[1], match.end()) for match in NAMED.finditer(PAGE)]
    ends = [*(start for _, start in found), len(PAGE)]
    texts = [
        (name, PAGE[start:end].split("\n\n")[0])
        for (name, start), (_, end) in zip(found, pairwise(ends), strict=True)
    ]
    return [(name, text) for name, text in texts if FIGURE.search(text)]


def values_of(results: dict[str, Any]) -> set[float]:
    return {
        value * scale
        for one in results["measurements"]
        for summary in one["summary"].values()
        for value in (summary[part] for part in ("mean", "median", "p50", "p90", "p99"))
        for scale in SCALES
    }


def is_kept(figure: str, values: set[float]) -> bool:
    """Whether a value, rounded as the figure is, is the figure."""
    decimals = len(figure.partition(".")[2])
    return any(f"{value:.{decimals}f}" == figure for value in values)


@pytest.mark.parametrize(("name", "text"), passages(), ids=lambda one: one.split(".json")[0][:40])
def test_figures_are_in_the_results_file(name: str, text: str) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    values = values_of(results)
    assert [one for one in FIGURE.findall(text) if not is_kept(one, values)] == []
    for equal, compared in re.findall(r"(\d+) of (\d+) likeliest", text):
        found = [one["quality"] for one in results["measurements"] if one["quality"]]
        assert any((q["equal"], q["compared"]) == (int(equal), int(compared)) for q in found)


def numbers_of(results: Any) -> Iterator[float]:
    """All that a results file has."""
    if isinstance(results, dict):
        results = [*results.values()]
    if isinstance(results, list):
        for part in results:
            yield from numbers_of(part)
    elif isinstance(results, int | float):
        yield float(results)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_decimals_of_a_paragraph_are_numbers_of_the_files_that_it_names(page: Path) -> None:
    """Seconds may be told in milliseconds, bytes in MB; `docs/cli.md` has a stricter test."""
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|] ?)", page.read_text(encoding="utf-8")):
        files = [ROOT / "benchmarks" / "results" / name for name in NAMED.findall(paragraph)]
        if files and page != CLI:
            found = {v for file in files for v in numbers_of(json.loads(file.read_text()))}
            values = {value * scale for value in found for scale in (1.0, 1e3, 1e-6)}
            assert [one for one in DECIMAL.findall(paragraph) if not is_kept(one, values)] == []


def test_passages_are_found_and_wrong_figures_too() -> None:
    assert len(passages()) >= 5
    assert is_kept("5.0", {4.952})
    assert not is_kept("5.0", {4.9})
    assert FIGURE.findall("1317 new, 4.5 ms of 192 KiB at 36,079 tokens") == ["1317", "4.5"]


def test_the_peer_that_is_ahead_is_said_to_be() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    name = "generate-gpt-oss-20b-amd-epyc-avx2-2c-24g.json"
    systems = [one for one in measured(name) if one["failure"] is None]
    (line,) = (line for line in page.splitlines() if line.startswith("- **MXFP4 in memory"))
    rates = [one["summary"]["decode_tokens_per_s"]["median"] for one in systems]
    assert re.findall(r"\d\.\d\d", line) == [f"{rate:.2f}" for rate in rates]
    assert [one["system"] for one in systems] == [
        *(f"{name}, all memory" for name in ("ours", "ours:int8", "llama.cpp")),
        *(f"{name}, 7 GiB" for name in ("ours", "llama.cpp")),
    ]
    assert rates[1] < rates[2]


def test_the_table_of_requests_in_groups_is_that_of_its_file() -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    name = "grouped-requests-amd-epyc-avx2-2c-24g.json"
    assert name in page
    cells = re.findall(r"^\| (\d+) % \| (\d+) \| (.* %) \|$", page, flags=re.MULTILINE)
    shown = {(int(share), int(group)): rest.split(" | ") for share, group, rest in cells}
    rows = [row for one in measured(name) for row in one["repetitions"]]
    assert len(shown) == len(rows) == 8
    for row in rows:
        rates = [value for metric, value in row.items() if metric.startswith("hit_rate_")]
        shares = [*rates, row["useful_share"], row["traffic_ratio"], row["stall_ratio"]]
        expected = [f"{100 * share:.1f} %" for share in shares]
        assert shown[round(100 * row["capacity"]), row["group"]] == expected


def test_rates_of_latent_attention_are_kept() -> None:
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    name = "latent-attention-amd-epyc-avx2-2c-24g.json"
    found = {one["system"]: one["summary"]["tokens_per_s"]["median"] for one in measured(name)}
    said = page.partition("cached tokens decode")[2].partition("whose products")[0]
    systems = ("ours", "expanding", "transformers")
    rates = [
        rate for system in systems for name, rate in found.items() if name.startswith(f"{system},")
    ]
    assert len(rates) == len(found) == 9
    assert re.findall(r"\d+\.\d", said) == [f"{rate:.1f}" for rate in rates]
    assert f"`benchmarks/results/{name}`" in page
