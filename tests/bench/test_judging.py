"""Better, worse or noise: against ranks counted by hand, and by the command."""

import json
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.benchmarks.suite import (
    MeasuredSystem,
    Metric,
    describe_system,
    make_results,
    write_results,
)
from moe_runtime.benchmarks.suite.comparing import judge
from moe_runtime.cli.main import main


def chance_by_counting(before: list[float], after: list[float]) -> float:
    """Share of all ways to deal the values in which the sum of ranks is at least as extreme."""
    ranked = sorted(before + after)
    ranks = [ranked.index(value) + 1 for value in after]
    ways = [sum(dealt) for dealt in combinations(range(1, len(ranked) + 1), len(after))]
    high = sum(way >= sum(ranks) for way in ways)
    low = sum(way <= sum(ranks) for way in ways)
    return min(high, low) / len(ways)


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ([10.0, 11, 12], [15.0, 16, 17], "worse"),
        ([15.0, 16, 17], [10.0, 11, 12], "better"),
        ([10.0, 11, 16], [15.0, 15.5, 17], "noise"),  # one of them lies among the others
        ([10.0, 11], [15.0, 16], "noise"),  # two repetitions say nothing
        ([10.0, 11, 12], [12.01, 12.02, 12.03], "noise"),  # certain, and below the bound
    ],
)
def test_words(before, after, word):
    found, change, chance = judge(before, after, bound=0.1, is_less_better=True)
    assert found == word
    assert chance == pytest.approx(chance_by_counting(before, after))
    assert change == pytest.approx(sorted(after)[len(after) // 2] / sorted(before)[1] - 1, abs=0.1)
    opposite = {"worse": "better", "better": "worse", "noise": "noise"}
    assert judge(before, after, bound=0.1, is_less_better=False)[0] == opposite[word]


def put(path: Path, times: list[float], **changes: Any) -> str:
    measured = MeasuredSystem(repetitions=[{"t_s": [one, one], "load_s": one} for one in times])
    metrics = {"t_s": Metric("s"), "load_s": Metric("s", is_judged=False)}
    one = describe_system("one", measured, metrics)
    gone = describe_system("gone", MeasuredSystem(failure="no room"), metrics)
    write_results(path, make_results("latency", {"threads": 2}, "time", [one, gone]) | changes)
    return str(path)


def put_failed(path: Path) -> str:
    """Results in which no system has numbers."""
    one = describe_system("one", MeasuredSystem(failure="out of it"), {})
    return put(path, [1.0], ended="failed", measurements=[one])


def test_a_regression_is_exit_code_1(tmp_path, capsys):
    old = put(tmp_path / "old.json", [10.0, 11, 12])
    new = put(tmp_path / "new.json", [15.0, 16, 17], settings={"threads": 1})
    assert main(["bench", "compare", old, new, "--json"]) == 1
    out, err = capsys.readouterr()
    (verdict,) = json.loads(out)["verdicts"]
    assert (verdict["metric"], verdict["word"], verdict["before"]) == ("t_s", "worse", 11)
    assert err == "moe-runtime: settings: threads: 2 before, 1 after\n"
    assert main(["bench", "compare", new, old]) == 0
    assert "better" in capsys.readouterr().out
    assert main(["bench", "compare", old, new, "--bound", "0.5"]) == 0
    assert "noise" in capsys.readouterr().out


def test_a_system_that_lost_its_numbers_is_said_and_counts(tmp_path, capsys):
    paths = [Path(put(tmp_path / f"{name}.json", [10.0, 11, 12])) for name in ("old", "new")]
    old, new = (json.loads(path.read_text()) for path in paths)
    # A second system with numbers before, which failed after, or was not asked for.
    old["measurements"][1] = old["measurements"][0] | {"system": "gone"}
    paths[0].write_text(json.dumps(old))
    words = ["bench", "compare", *map(str, paths), "--json"]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["lost"] == {"gone": "no room"}
    assert err == "moe-runtime: gone: has no numbers after: no room\n"
    del new["measurements"][1]
    paths[1].write_text(json.dumps(new))
    assert main(words) == 0
    assert capsys.readouterr().err == "moe-runtime: gone: was not measured after\n"


def test_what_cannot_be_compared(tmp_path, capsys):
    old = put(tmp_path / "old.json", [10.0, 11, 12])
    other = put(tmp_path / "other.json", [10.0, 11, 12], case="io")
    failed = put_failed(tmp_path / "failed.json")
    for words, complaint in (
        ([old, other], "expected results of one case, got 'latency' and 'io'"),
        ([old, failed], "no system has numbers in both results: one before, none after"),
        ([failed, old], "no system has numbers in both results: none before, one after"),
        ([failed, failed], "no system has numbers in both results: none before, none after"),
        ([old, str(tmp_path / "none.json")], "No such file"),
    ):
        assert main(["bench", "compare", *words]) == 2
        err = capsys.readouterr().err
        assert (err.count("\n"), complaint in err) == (1, True), err


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text[: len(text) // 2], "not results of moe-runtime bench, version 1: "),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version: 1 was expected"),
        (lambda text: text.replace("moe-runtime-bench", "x"), "results.format: 'moe-runtime-"),
        (lambda text: text.replace('"gone"', '"one"'), "[1]: 'one' is there a second time"),
        (lambda text: re.sub(r'"measurements": .*\]', '"measurements": []', text, flags=re.S),
         "expected at least one system, got none"),
        (lambda text: re.sub(r'"repetitions": \[\s*\{.*?\}\s*\]', '"repetitions": []', text,
                             flags=re.S), "[0]: a summary without the repetitions"),
        (None, "Is a directory"),
    ],
    ids=["cut", "version", "format", "twice", "none", "summary", "folder"],
)  # fmt: skip
def test_what_is_no_results_file_is_one_line(change, complaint, tmp_path, capsys):
    good, bad, page = put(tmp_path / "good.json", [1.0, 2]), tmp_path / "bad", tmp_path / "p.html"
    if change is None:
        bad.mkdir()
    else:
        text = Path(good).read_text()
        bad.write_text(change(text))
        assert bad.read_text() != text
    page.write_text("old")
    compare, report = ["bench", "compare"], ["bench", "report", "-o", str(page)]
    for words in (
        [*compare, good, str(bad)],
        [*compare, str(bad), good],
        [*report, str(bad)],
        [*report, good, str(bad)],
    ):
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"moe-runtime: error: {bad}: ")
        assert complaint in err
    assert page.read_text() == "old"


def test_a_file_beside_itself(tmp_path, capsys):
    """Nothing differs; a page would show each number twice."""
    file, link, page = put(tmp_path / "r.json", [1.0, 2, 3]), tmp_path / "l", tmp_path / "p.html"
    link.symlink_to(file)
    assert main(["bench", "compare", file, file, "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert {(one["word"], one["change"]) for one in verdicts} == {("noise", 0)}
    for again in (file, str(link)):
        assert main(["bench", "report", file, again, "-o", str(page)]) == 2
        err = capsys.readouterr().err
        assert (
            err
            == f"moe-runtime: error: {again}: is given a second time; give each results file once\n"
        )
        assert not page.exists()


def test_a_page_of_failures_says_so(tmp_path, capsys):
    file, page = put_failed(tmp_path / "failed.json"), tmp_path / "p.html"
    assert main(["bench", "report", file, "-o", str(page)]) == 0
    said = f"moe-runtime: {file}: no system has numbers; the page says what failed\n"
    assert said in capsys.readouterr().err
    text = page.read_text()
    assert "failed.json: one has no numbers" in text
    assert "out of it" in text


@pytest.mark.usefixtures("plots")
def test_the_report_has_every_number(tmp_path, capsys):
    old = put(tmp_path / "old.json", [0.010, 0.011, 0.012])
    new = put(tmp_path / "<new>|.json", [0.015, 0.016, 0.017])
    paths = {name: tmp_path / name for name in ("p.html", "plots", "t.md", "t.csv")}
    words = ["-o", str(paths["p.html"]), "--png", str(paths["plots"])]
    words += ["--markdown", str(paths["t.md"]), "--csv", str(paths["t.csv"]), "--json"]
    assert main(["bench", "report", old, new, *words]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    assert all(Path(path).stat().st_size for path in written)
    assert [path.name for path in paths["plots"].iterdir()] == ["latency-t-s.png"]
    page = paths["p.html"].read_text()
    assert "<new>" not in page
    assert "&lt;new&gt;|.json" in page
    for number in ("11 ms", "no room", "threads"):
        assert number in page
    lines = paths["t.csv"].read_text().splitlines()
    assert lines[1].startswith("latency,,one (old.json),t_s,3,s,less,True,0.011,")
    assert len(lines) == 1 + 2 * 2
    table = paths["t.md"].read_text().splitlines()
    assert {line.replace(r"\|", "").count("|") for line in table} == {12}


@pytest.mark.usefixtures("plots")
def test_without_what_draws_the_report_has_numbers(tmp_path, capsys, monkeypatch):
    file, page = put(tmp_path / "r.json", [0.010, 0.011, 0.012]), tmp_path / "p.html"
    # As where it is not installed: an import of it fails.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "report", file, "-o", str(page)]) == 0
    assert "pip install 'moe-runtime[report]'" in capsys.readouterr().err
    text = page.read_text()
    assert "<svg" not in text
    assert "<details open>" in text
    assert "<td>3</td><td>11</td>" in text
    assert main(["bench", "report", file, "--png", str(tmp_path / "plots")]) == 2
    assert "plots need matplotlib" in capsys.readouterr().err
