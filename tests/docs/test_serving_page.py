"""The files of `examples/serving` and the metrics of `docs/serving.md` fit the program."""

import json
import re
from pathlib import Path

import yaml
from command_lines import require_sound

from moe_runtime.serving.http.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
FILES = {path.name: path.read_text() for path in (ROOT / "examples" / "serving").iterdir()}
METRIC = re.compile(r"\b(?:vllm|moe):\w+")


def exposed() -> dict[str, str]:
    """Kinds of all metrics, by the names that `/metrics` has."""
    lines = Metrics(dict).text().decode().splitlines()
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", "\n".join(lines), re.M))


def test_the_unit_and_the_container_call_the_program_as_it_is():
    (started,) = re.findall(r"^ExecStart=\S*/moe-runtime (.*)$", FILES["moe-runtime.service"], re.M)
    require_sound(started)
    container = dict(re.findall(r"^(ENTRYPOINT|CMD) (.*)$", FILES["Dockerfile"], re.M))
    program, *words = [*json.loads(container["ENTRYPOINT"]), *json.loads(container["CMD"])]
    assert program == "moe-runtime"
    require_sound(" ".join(words))
    compose = yaml.safe_load(FILES["compose.yaml"])["services"]["moe-runtime"]
    folder = ROOT / "examples" / "serving" / compose["build"]["context"]
    assert (folder / compose["build"]["dockerfile"]).is_file()
    assert f"/run/secrets/{compose['secrets'][0]}" in words
    assert [volume.rsplit(":", 2)[1] for volume in compose["volumes"]] == [words[1]]


def test_the_dashboard_asks_for_metrics_that_there_are():
    names = set()
    for name, kind in exposed().items():
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + end for end in ends}
    panels = json.loads(FILES["grafana.json"])["panels"]
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
