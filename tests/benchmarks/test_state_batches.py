"""The page of the engine gives the figures of the results file."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_ratios_are_the_measured_ones() -> None:
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"state-batches-[\w-]+\.json", page)
    results = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    rows = results["rows"]
    (text,) = (part for part in page.split("\n\n") if name in part)
    measured = [f"{row['ratio']:.2f}" for row in rows if row["sequences"] > 1]
    assert re.findall(r"\d\.\d\d", text) == measured
    (most,) = re.findall(r"by up to (\d+) %", text)
    alone = [row["ratio"] for row in rows if row["sequences"] == 1]
    assert max(abs(ratio - 1) for ratio in alone) <= int(most) / 100 + 1e-9
    after = page.split(text)[1].split("\n\n")[1]
    alone = rows[0]["our_convolutions_tokens_per_s"], rows[0]["torch_convolutions_tokens_per_s"]
    rates = [*alone, results["transformers_tokens_per_s"]]
    assert re.findall(r"\d+\.\d\b", after) == [f"{rate:.1f}" for rate in rates]
