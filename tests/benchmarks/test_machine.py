"""The commit that a results file names."""

import subprocess
from pathlib import Path

from harness.machine import commit


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_results_of_the_measurement_itself_are_no_change_of_the_code(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "code.py").write_text("1\n")
    (results / "a.json").write_text("{}\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    clean = commit(tmp_path)
    assert len(clean) == 12

    (results / "a.json").write_text("[]\n")
    assert commit(tmp_path) == clean
    assert commit(tmp_path / "benchmarks") == clean

    (tmp_path / "code.py").write_text("2\n")
    assert commit(tmp_path / "benchmarks") == clean + "+changes"
    assert commit(tmp_path.parent) == "unknown"
