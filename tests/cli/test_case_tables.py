"""Tables of cases with many columns: on narrow terminals they have the same words, none broken."""

import json
from pathlib import Path

import pytest

from moe_runtime.benchmarks.commands.shared import show_results

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize(
    "name",
    [
        "bench-ops-amd-epyc-2c-24g",
        "bench-experts-amd-epyc-2c-24g",
        "bench-experts-formats-gpt-oss-20b-intel-xeon-2c-24g",
        "bench-policies-amd-epyc-2c-24g",
    ],
)
def test_no_word_is_broken(name, width, monkeypatch, capsys):
    results = json.loads((RESULTS / f"{name}.json").read_text())
    lines = {}
    for columns in (width, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        show_results(results)
        lines[columns] = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[width])) <= width
    narrow, wide = (
        {word.rstrip(":") for line in lines[columns] for word in line.split() if set(word) != {"─"}}
        for columns in (width, 300)
    )
    assert narrow == wide
    halves = [line.split("±")[1].split()[:1] for line in lines[width] if "±" in line]
    assert all(halves)  # behind what they belong to, on its line
