"""Results of different work: never side by side, and said what each measured."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.benchmarks.suite import (
    MeasuredSystem,
    Metric,
    comparing,
    describe_system,
    make_results,
    write_results,
)
from moe_runtime.cli.main import main

LATENCY = {
    "model": "olmoe-1b-7b",
    "layers": 4,
    "layers_of_shape": 16,
    "weights": "random",
    "prompt_tokens": [64, 64],
    "new_tokens": 16,
    "num_threads": 2,
}
CAPPED = "cap 7 GiB"


def put(path: Path, ended: str = "time", case: str = "latency", **settings: Any) -> str:
    measured = MeasuredSystem(repetitions=[{"t_s": one} for one in (0.010, 0.011, 0.012)])
    one = describe_system("one", measured, {"t_s": Metric("s")})
    write_results(path, make_results(case, LATENCY | settings, ended, [one]))
    return str(path)


def test_a_heading_names_what_was_measured():
    def words(case: str = "latency", **changed: Any) -> str:
        settings = LATENCY if case == "latency" else {}
        return comparing.heading_words({"case": case, "settings": settings | changed})

    model = "olmoe-1b-7b, layers 4 of 16, weights random"
    assert words() == f"{model}, prompt tokens 64, new tokens 16"
    assert words(layers=16).startswith("olmoe-1b-7b, layers 16, weights")
    assert words(prompt_tokens=[8, 128]) == f"{model}, prompt tokens 8 and 128, new tokens 16"
    mixed = {"case": "latency", "settings": LATENCY | {"prompt_tokens": [128, 8, 128, 64]}}
    assert comparing.work_of(mixed)["prompt_tokens"] == [8, 64, 128]
    assert words("experts", dtype="bfloat16", memory=2 << 30) == "bfloat16, memory 2 GiB"
    assert words("serve", model="m", chat=False, ignore_eos=True) == "m, ignore eos"


@pytest.mark.long
def test_settings_of_a_changed_file_may_be_anything(tmp_path):
    odd = put(tmp_path / "odd.json", prompt_tokens=[[64], "a", None, 128, 64, 128])
    assert main(["bench", "compare", odd, odd]) == 0
    for cap in ("7GiB", 10**400, -1, [1], True):
        put(tmp_path / "cap.json", cap_bytes=cap)
        words = [str(tmp_path / "cap.json"), "-o", str(tmp_path / "p.html")]
        assert main(["bench", "report", *words]) == 0
    assert main(["bench", "compare", odd, put(tmp_path / "a.json")]) == 2
    content = Path(odd).read_text()
    for name in ("", "_s"):
        Path(odd).write_text(content.replace('"t_s"', f'"{name}"'))
        assert main(["bench", "report", odd, "-o", str(tmp_path / "p.html")]) == 0


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"layers": 16}, "layers 4 before, 16 after"),
        ({"prompt_tokens": [128]}, "prompt_tokens [64] before, [128] after"),
        ({"new_tokens": 32}, "new_tokens 16 before, 32 after"),
        ({"prompt_tokens": [64] * 4, "num_threads": 1}, None),
    ],
)
def test_other_work_is_not_compared(changed, complaint, tmp_path, capsys):
    words = [put(tmp_path / "a.json"), put(tmp_path / "b.json", **changed)]
    assert main(["bench", "compare", *words]) == (2 if complaint else 0)
    err = capsys.readouterr().err
    assert (complaint or "num_threads: 2 before, 1 after") in err
    assert err.count("\n") == (1 if complaint else 2)


@pytest.mark.parametrize(
    ("case", "name", "before", "after", "complaint"),
    [
        ("placements", "aligned", True, False, "aligned True before, False after"),
        ("policies", "train", None, "b.npz", "train None before, 'b.npz' after"),
        (
            *("ablation", "configuration", {"run.seed": 0, "optimizer.peak_rate": 1.0}),
            *({"run.seed": 0, "optimizer.peak_rate": 2.0},),
            "configuration.optimizer.peak_rate 1.0 before, 2.0 after",
        ),
    ],
)
def test_each_setting_that_changes_the_work_counts(case, name, before, after, complaint):
    one, other = ({"case": case, "settings": {name: value}} for value in (before, after))
    comparing.require_same_work(one, one)
    with pytest.raises(ValueError, match=f"the same work, got {re.escape(complaint)};"):
        comparing.require_same_work(one, other)


@pytest.mark.usefixtures("plots")
def test_the_report_keeps_other_work_apart_and_says_what_was_interrupted(tmp_path, capsys):
    files = [
        put(tmp_path / "a.json"),
        put(tmp_path / "b.json", "interrupted"),
        put(tmp_path / "c.json", layers=16),
        put(tmp_path / "d.json", layers=16, cap_bytes=7 << 30),
    ]
    outputs = {name: tmp_path / name for name in ("p.html", "plots", "t.md", "t.csv")}
    words = ["-o", outputs["p.html"], "--png", outputs["plots"], "--markdown", outputs["t.md"]]
    assert main(["bench", "report", *files, *map(str, [*words, "--csv", outputs["t.csv"]])]) == 0
    assert f"{files[1]}: was interrupted" in capsys.readouterr().err
    assert {path.name for path in outputs["plots"].iterdir()} == {
        *("latency-t-s.png", "latency-t-s-2.png", "latency-t-s-3.png")
    }
    page = outputs["p.html"].read_text()
    for place in (
        "layers 4 of 16",
        "layers 16, weights random",
        "one (b.json), interrupted",
        CAPPED,
    ):
        assert all(place in path.read_text() for path in outputs.values() if path.suffix), place
    assert page.count("<h2") >= 3
    # The only one of its work needs no name of its file.
    *_, uncapped, capped = outputs["t.csv"].read_text().splitlines()
    assert all(",one,t_s," in line for line in (uncapped, capped))
    assert CAPPED not in uncapped
    assert main(["bench", "compare", files[0], files[1]]) == 0
    assert f"{files[1]}: was interrupted" in capsys.readouterr().err


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    files = [tmp_path / folder / "a.json" for folder in ("old", "new")]
    for file in files:
        file.parent.mkdir()
        put(file)
    words = [*map(str, files), "-o", str(tmp_path / "p.html"), "--csv", str(tmp_path / "t.csv")]
    assert main(["bench", "report", *words]) == 0
    found = (tmp_path / "t.csv").read_text()
    assert all(found.count(f"one ({file})") == 1 for file in files)


def test_results_are_shown_where_their_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    """A disk that fills up meanwhile."""
    import errno
    import os

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("moe_runtime.benchmarks.suite.write_text", full)
    words = ["bench", "io", "models/pocket", "--experts", "4", "--time", "1", "--quick"]
    assert main([*words, "--json", "-o", str(tmp_path / "r.json")]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["case"] == "io"
    assert f"{tmp_path}/r.json: the results cannot be written: No space left on device" in err
