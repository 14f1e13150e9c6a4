"""The document names every gate and loss, with the numbers of its results file."""

import json
import re
from pathlib import Path

from moe_runtime.routing import GATES, LOSSES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "gates.md").read_text()


def test_every_gate_and_loss_has_a_row():
    rows = re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE)
    own = {name for gate in GATES.values() for name in gate.own_loss_names}
    assert set(rows) == {*GATES, *LOSSES, *own}


def test_numbers_are_those_of_the_results_file():
    path = ROOT / "benchmarks" / "results" / "ablation-gates-amd-epyc-2c-24g.json"
    measured = json.loads(path.read_text())["measurements"]
    found = {one["system"]: one["summary"] for one in measured}
    found["softmax_topk"] = found.pop("as configured")
    assert found.keys() == set(GATES)
    for gate, summary in found.items():
        load, loss = (summary[metric]["mean"] for metric in ("max_load", "loss"))
        cells = f"| {load:.2f} | {loss:.2f} |"
        (line,) = (line for line in TEXT.splitlines() if line.startswith(f"| `{gate}` |"))
        assert line.endswith(cells)
