"""The commit and the machine that a results file names."""

import os
import subprocess
from pathlib import Path

from moe_runtime.benchmarks.harness.scripting import commit, describe_machine, machine_name


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


def test_machine_name_is_a_file_name() -> None:
    assert describe_machine()["num_cores"] == len(os.sched_getaffinity(0))
    facts = {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "num_cores": 2, "memory_bytes": 25 << 30}
    assert machine_name(facts) == "intel-xeon-2-20ghz-2c-25g"
    older = facts | {"cpu": "AMD EPYC", "cpu_features": ["avx2", "fma"]}
    assert machine_name(older) == "amd-epyc-avx2-2c-25g"
    assert machine_name(older | {"cpu_features": ["avx2", "avx512f"]}) == "amd-epyc-2c-25g"
