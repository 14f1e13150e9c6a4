"""Tables of cases with many columns: on narrow terminals they have the same words, none broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Capsys, Patch

from moe_runtime.benchmarks.commands.layers import show_experts, show_formats, show_ops

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize(
    ("name", "show"),
    [
        ("bench-ops-amd-epyc-2c-24g", show_ops),
        ("bench-experts-amd-epyc-2c-24g", show_experts),
        ("bench-experts-formats-gpt-oss-20b-intel-xeon-2c-24g", show_formats),
    ],
)
def test_no_word_is_broken(
    name: str,
    show: Callable[[dict[str, Any]], None],
    width: int,
    monkeypatch: Patch,
    capsys: Capsys,
) -> None:
    results = json.loads((RESULTS / f"{name}.json").read_text())
    lines = {}
    for columns in (width, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        show(results)
        lines[columns] = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[width])) <= width
    narrow, wide = (
        {word.rstrip(":") for line in lines[columns] for word in line.split() if set(word) != {"─"}}
        for columns in (width, 300)
    )
    assert narrow == wide
    halves = [line.split("±")[1].split()[:1] for line in lines[width] if "±" in line]
    assert all(halves)  # behind what they belong to, on its line
