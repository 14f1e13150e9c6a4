"""The metrics of `docs/serving.md` and of the dashboard are those of the program."""

import json
import re
from pathlib import Path

from moe_runtime.serving.http.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
METRIC = re.compile(r"\b(?:vllm|moe):\w+")


def exposed() -> dict[str, str]:
    """Kinds of all metrics, by the names that `/metrics` has."""
    lines = Metrics(dict).text().decode().splitlines()
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", "\n".join(lines), re.M))


def test_the_dashboard_asks_for_metrics_that_there_are():
    names = set()
    for name, kind in exposed().items():
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + end for end in ends}
    panels = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
    asked = [one["expr"] for panel in panels for one in panel["targets"]]
    for expression in asked:
        found = set(METRIC.findall(expression))
        assert found, expression
        assert found <= names
    for part in ("prefetch_useful_total", "num_preemptions_total", "expert_slots"):
        assert any(part in expression for expression in asked)
    cells = [
        (column, row)
        for place in (panel["gridPos"] for panel in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels lie on one another"
    assert max(column for column, _ in cells) < 24


def test_the_table_of_metrics_is_whole():
    table = PAGE.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    assert set(METRIC.findall(table)) == exposed().keys()
