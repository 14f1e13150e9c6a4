"""The page of the architecture gives the figures of the results files."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def results_of(pattern: str) -> Any:
    (path,) = RESULTS.glob(pattern)
    return json.loads(path.read_text())


def row_of(first_cell: str) -> str:
    (line,) = (line for line in TEXT.splitlines() if line.startswith(f"| {first_cell} |"))
    return line


def test_imports() -> None:
    rows = results_of("imports-*.json")["rows"]
    for door in ("load", "load and generate", "moe-runtime run"):
        before, now = (row for row in rows if row["door"] == door)
        cells = " | ".join(f"{row['modules']}, {row['lines']:,}" for row in (before, now))
        assert row_of(f"modules and lines imported by `{door}`").endswith(f"| {cells} |")


def test_calls_of_a_layer() -> None:
    row = results_of("decode-layer-intel-*.json")["row"]
    calls = f"{row['calls_per_layer']} calls of Python functions in {row['files_per_layer']} files"
    assert calls in " ".join(TEXT.split())


def test_speed_of_a_step() -> None:
    found = results_of("decode-layer-intel-*.json")
    assert found["settings"] == {"model": "pocket", "threads": 1, "steps": 200}
    ratio = f"| 1 | {found['row']['against']['ratio']:.2f} |"
    assert row_of("speed of a step, `pocket`, all resident, one thread").endswith(ratio)
