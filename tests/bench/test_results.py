"""Results files: the schema says what they are, and what is damaged is refused in one line."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_runtime.bench.intervals import percentile
from moe_runtime.bench.results import (
    Metric,
    describe_system,
    make_results,
    read_results,
    write_results,
)
from moe_runtime.bench.runner import MeasuredSystem
from moe_runtime.bench.schema import read_schema, require_valid
from moe_runtime.errors import CheckpointError


def results() -> dict[str, Any]:
    measured = MeasuredSystem(repetitions=[{"t_s": [1.0, 2.0, 9.0]}, {"t_s": [3.0]}])
    one = describe_system(
        "one",
        measured,
        {"t_s": Metric("s")},
        system_versions={},
        quality={"compared": 4, "equal": 3},
    )
    return make_results("latency", {"new_tokens": 2}, "time", [one])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_results(path, results() | {"command": "moe-runtime bench latency M"})
    found = read_results(path)
    assert found["measurements"] == results()["measurements"]
    summary = found["measurements"][0]["summary"]["t_s"]
    # Medians of the repetitions, 2 and 3: mean 2.5, standard error 0.5, t(1) = 12.7062.
    assert (summary["mean"], summary["median"]) == (2.5, 2.5)
    assert summary["high"] - summary["mean"] == pytest.approx(12.7062 * 0.5, rel=1e-4)
    assert (summary["p50"], summary["p90"]) == (2.5, pytest.approx(7.2))


def test_percentiles_are_numpys() -> None:
    values = [5.0, 1.0, 4.0, 4.5, 0.25, 7.0]
    for share in (0, 13, 50, 90, 99, 100):
        assert percentile(values, share / 100) == pytest.approx(np.percentile(values, share))


DAMAGES = {
    ("version",): (2, "results.version: expected 1, got 2"),
    ("format",): ("x", "results.format: expected 'moe-runtime-bench'"),
    ("measurements", 0, "quality", "equal"): (-1, "quality.equal: expected at least 0, got -1"),
    ("measurements", 0, "repetitions", 0, "t_s"): ("x", "t_s: expected number or array, got 'x'"),
    ("measurements", 0, "repetitions", 0, "t_s", 1): (True, "t_s[1]: expected number, got True"),
    ("measurements", 0, "summary", "t_s", "better"): ("so", "expected 'less' or 'more', got 'so'"),
    ("more",): (1, "results: has 'more', which is unknown"),
    ("measurements", 0, "summary", "t_s", "p50"): (10**400, "p50: expected a number up to 1e+100"),
    ("machine",): ([], "results.machine: expected object, got []"),
}


@pytest.mark.parametrize("place", DAMAGES, ids=str)
def test_what_the_schema_refuses(place: tuple[Any, ...], tmp_path: Path) -> None:
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
def test_what_is_no_results_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(CheckpointError, match="not results of moe-runtime bench"):
        read_results(tmp_path / "r.json")


def test_committed_results_are_still_read() -> None:
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    names = ("latency-*", "throughput-*", "io-*", "bench-*")
    found = [read_results(path) for name in names for path in sorted(folder.glob(f"{name}.json"))]
    cases = {one["case"] for one in found}
    assert cases == {
        "latency",
        "throughput",
        "io",
        "experts",
        "layer",
        "ops",
        "policies",
        "training",
        "dispatch",
        "kernels",
    }
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


# By results file: the numbers of its sentence in docs/cli.md, each by metric, system, part, factor
# and digits.
TOLD: dict[str, list[tuple[str, str, str, float, int]]] = {
    "throughput-pocket": [
        ("new_tokens_per_s", system, "median", 1, 0)
        for system in ("moe_runtime", "transformers:grouped_mm", "transformers:eager")
    ],
    "io-pocket": [
        (metric, system, part, factor, 2)
        for metric, part, factor in (("bytes_per_s", "median", 1e-9), ("expert_read_s", "p99", 1e3))
        for system in ("moe_runtime", "preadv", "preadv:direct")
    ],
    **{
        name: [
            (f"forward_{tokens}_s", system, "median", 1e3, 1)
            for system in ("moe_runtime", "grouped_mm")
            for tokens in (1, 16, 256)
        ]
        for name in ("bench-experts", "bench-layer")
    },
    "bench-policies": [
        ("hit_rate_at_0.25", system, "median", 100, 2) for system in ("lru", "lfu", "belady-bypass")
    ],
}


@pytest.mark.parametrize("name", TOLD)
def test_numbers_of_the_page_are_those_of_the_files(name: str) -> None:
    root = Path(__file__).resolve().parents[2]
    file = f"benchmarks/results/{name}-amd-epyc-2c-24g.json"
    found = {one["system"]: one["summary"] for one in read_results(root / file)["measurements"]}
    _, _, told = (root / "docs" / "cli.md").read_text("utf-8").partition(f"`{file}`")
    place = 0
    for metric, system, part, factor, digits in TOLD[name]:
        number = f" {found[system][metric][part] * factor:.{digits}f}"
        place = told.find(number, place, 400)
        assert place >= 0, (metric, system, number)


def test_every_keyword_of_the_schema_is_checked() -> None:
    """An unknown one would be left unchecked without a word."""
    require_valid(results(), read_schema())
    with pytest.raises(NotImplementedError, match="maximum"):
        require_valid(1, {"maximum": 0})
