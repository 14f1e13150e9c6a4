"""Results files: the schema says what they are, and what is damaged is refused in one line."""

import copy
import csv
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_runtime.benchmarks.suite import (
    MeasuredSystem,
    Metric,
    describe_system,
    make_results,
    read_results,
    write_results,
)
from moe_runtime.benchmarks.suite.report_page import results_page
from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError


def results() -> dict[str, Any]:
    measured = MeasuredSystem(repetitions=[{"t_s": [1.0, 2.0, 9.0]}, {"t_s": [3.0]}])
    one = describe_system(
        "one", measured, {"t_s": Metric("s")}, quality={"compared": 4, "equal": 3}
    )
    return make_results("latency", {"new_tokens": 2}, "time", [one])


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "r.json"
    write_results(path, results() | {"command": "moe-runtime bench latency M"})
    found = read_results(path)
    assert found["measurements"] == results()["measurements"]
    summary = found["measurements"][0]["summary"]["t_s"]
    # Medians of the repetitions, 2 and 3: mean 2.5, standard error 0.5, t(1) = 12.7062.
    assert (summary["mean"], summary["median"]) == (2.5, 2.5)
    assert summary["high"] - summary["mean"] == pytest.approx(12.7062 * 0.5, rel=1e-4)
    assert (summary["p50"], summary["p90"]) == (2.5, pytest.approx(7.2))


DAMAGES = {
    ("version",): (2, "results.version: 1 was expected"),
    ("format",): ("x", "results.format: 'moe-runtime-bench' was expected"),
    ("measurements", 0, "quality", "equal"): (-1, "equal: -1 is less than the minimum of 0"),
    ("measurements", 0, "repetitions", 0, "t_s"): ("x", "'x' is not of type 'number', 'array'"),
    ("measurements", 0, "repetitions", 0, "t_s", 1): (True, "t_s[1]: True is not of type"),
    ("measurements", 0, "summary", "t_s", "better"): ("so", "'so' is not one of ['less', 'more']"),
    ("more",): (1, "results: Additional properties are not allowed ('more'"),
    ("measurements", 0, "summary", "t_s", "p50"): (10**400, "p50: 1000"),
    ("machine",): ([], "results.machine: [] is not of type 'object'"),
}


@pytest.mark.parametrize("place", DAMAGES, ids=str)
def test_what_the_schema_refuses(place, tmp_path):
    value, complaint = DAMAGES[place]
    damaged = copy.deepcopy(results())
    target: Any = damaged
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    (tmp_path / "r.json").write_text(json.dumps(damaged))
    with pytest.raises(CheckpointError) as refused:
        read_results(tmp_path / "r.json")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="results"):
        write_results(tmp_path / "new.json", damaged)
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"format": NaN}', "[" * 100_000, "{}"])
def test_what_is_no_results_file(text, tmp_path):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(CheckpointError, match="not results of moe-runtime bench"):
        read_results(tmp_path / "r.json")


def test_the_page_says_what_its_bars_show():
    """The best by the mean is not the best by the median here."""
    values = {"uneven": [2.0, 2.0, 11.0], "even": [4.0, 4.0, 4.0]}
    metrics = {"t_s": Metric("s", is_judged=True), "rate": Metric("1/s", "more", is_judged=True)}
    measured = [
        describe_system(
            name,
            MeasuredSystem(repetitions=[{"t_s": [one, one], "rate": one} for one in found]),
            metrics,
        )
        for name, found in values.items()
    ]
    page = results_page([("r", make_results("latency", {}, "time", measured))], has_plots=True)
    for section, best in zip(page.sections, ("even is 4 s", "uneven is 5 1/s"), strict=False):
        assert f"The mean of {best}, the best of them." in section.lesson
        assert section.figure is not None
        axes = section.figure.axes[0]
        assert [bar.get_width() for bar in axes.patches] == [5.0, 4.0]  # of uneven and even


def test_bounds_are_marked_in_the_bars_of_their_systems():
    metrics = {"step_s": Metric("s"), "bound_s": Metric("s", is_judged=False)}
    found = {"plain": {"step_s": 3.0}, "bounded": {"step_s": 2.0, "bound_s": 1.5}}
    measured = [
        describe_system(name, MeasuredSystem(repetitions=[numbers]), metrics)
        for name, numbers in found.items()
    ]
    page = results_page([("r", make_results("latency", {}, "time", measured))], has_plots=True)
    figure = page.sections[0].figure
    assert figure is not None
    (marks,) = [line for line in figure.axes[0].lines if line.get_label() == "bound_s"]
    assert marks.get_path().vertices.tolist() == [[1.5, 1.0]]


FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FILES = sorted(FOLDER.iterdir())


@pytest.fixture(scope="module")
def committed() -> dict[Path, dict[str, Any]]:
    """Read once: the schema takes seconds for all of them."""
    return {path: read_results(path) for path in FILES}


def test_one_page_is_made_of_all_committed_files(committed, tmp_path, monkeypatch, capsys, recwarn):
    monkeypatch.setattr("moe_runtime.benchmarks.suite.read_results", committed.__getitem__)
    found = {path.name: results for path, results in committed.items()}
    assert len(found) > 50
    page, table = tmp_path / "page.html", tmp_path / "table.csv"
    words = ["bench", "report", *map(str, FILES), "-o", str(page), "--csv", str(table)]
    assert main(words) == 0
    *said, plots = capsys.readouterr().err.splitlines()
    interrupted = [path for path in FILES if found[path.name]["ended"] == "interrupted"]
    assert said == [
        f"moe-runtime: {path}: was interrupted, and the page says so" for path in interrupted
    ]
    assert "numbers and no plots" in plots
    assert [str(one.message) for one in recwarn] == []
    text = page.read_text(encoding="utf-8")
    assert [name for name in found if name not in text] == []
    # Links to sections work, and neither their list nor the longest table stands before the first.
    anchors = re.findall(r'<section id="([^"]*)"', text)
    assert len(set(anchors)) == len(anchors) > 100
    assert [one for one in anchors if not re.fullmatch(r"[\w.-]+", one)] == []
    assert f"<details>\n  <summary>{len(anchors)} sections</summary>" in text
    assert f"and {len(found) - 3} more, named below</p>" in text
    rows = [*csv.DictReader(table.open(encoding="utf-8"))]
    num_metrics = (len(m["summary"]) for one in found.values() for m in one["measurements"])
    assert len(rows) == sum(num_metrics)


def test_committed_summaries_are_those_of_their_repetitions(committed):
    for path, found in committed.items():
        assert datetime.fromisoformat(found["date"]).tzinfo is not None, path
        assert found["commit"], path
        assert found["machine"]["cpu"], path
        systems = [one["system"] for one in found["measurements"]]
        assert len(systems) == len(set(systems)) > 0, path
        for one in found["measurements"]:
            assert (one["failure"] is None) == bool(one["repetitions"]), path
            for metric, summary in one["summary"].items():
                values = [np.median(row[metric]) for row in one["repetitions"] if metric in row]
                assert summary["median"] == pytest.approx(np.median(values)), path
                if (
                    found["case"] != "quality"
                ):  # whose mean is that of all tokens, not of equal parts
                    assert summary["mean"] == pytest.approx(np.mean(values)), path


def test_answers_of_committed_cases_are_equal(committed):
    names = ("latency-", "throughput-", "io-", "bench-")
    found = [results for path, results in committed.items() if path.name.startswith(names)]
    cases = {one["case"] for one in found}
    texts = {"latency", "throughput", "io", "experts", "layer", "ops"}
    traces = {"policies", "predictors", "placements"}
    assert cases == texts | traces | {"training", "dispatch", "kernels"}
    for one in found:
        asked = one["settings"].get("agreement")
        least = 0.9 if asked is None else asked
        for measured in one["measurements"]:
            if (quality := measured["quality"]) is None:
                # nothing is compared: tiles of one product, plain reads, who has no numbers
                is_read = "formats" in one["settings"] and measured["system"].startswith("read, ")
                assert one["case"] == "kernels" or is_read or measured["failure"]
                continue
            assert quality["equal"] >= least * quality["compared"]
            assert quality["compared"] > 0
