"""The page of the engine gives the figures of the results files."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("together", "apart", "transformers_steps", "torch_convolutions")


def test_rates_are_the_measured_ones() -> None:
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    names = re.findall(r"state-batches-[\w-]+\.json", page)
    expected, alone = [], []
    for name in names:
        results = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        for one in results["measurements"]:
            (row,) = one["repetitions"]
            if one["system"] == "transformers":
                alone.append(f"{row['tokens_per_s']:.1f}")
            elif row.get("share") == 1:
                rates = [f"{row[f'{column}_tokens_per_s']:.1f}" for column in COLUMNS]
                expected.append([str(row["sequences"]), *rates])
    table, after = page.split(names[-1])[1].split("\n\n")[1:3]
    lines = table.splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines] == expected
    assert re.findall(r"\d+\.\d\b", after) == alone
