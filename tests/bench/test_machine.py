"""Parts of the scripts: the machine and commit of results, sizes, waits of a service."""

import os
import subprocess
import time
from pathlib import Path

from moe_runtime.benchmarks.elastic import TokenTimes
from moe_runtime.benchmarks.harness.scripting import machine_name
from moe_runtime.benchmarks.house import ROOT, sizes
from moe_runtime.lab.this_machine import commit, describe_machine


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_results_of_the_measurement_itself_are_no_change_of_the_code(tmp_path):
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


def test_machine_name_is_a_file_name():
    assert describe_machine()["num_cores"] == len(os.sched_getaffinity(0))
    facts = {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "num_cores": 2, "memory_bytes": 25 << 30}
    assert machine_name(facts) == "intel-xeon-2-20ghz-2c-25g"
    older = facts | {"cpu": "AMD EPYC", "cpu_features": ["avx2", "fma"]}
    assert machine_name(older) == "amd-epyc-avx2-2c-25g"
    assert machine_name(older | {"cpu_features": ["avx2", "avx512f"]}) == "amd-epyc-2c-25g"


def test_the_product_is_its_rooms():
    found = sizes(ROOT)
    rooms = [one for name, one in found.items() if name not in ("product", "tests")]
    for what in ("lines", "files"):
        assert found["product"][what] == sum(one[what] for one in rooms) > 0
    assert found["moe_runtime"]["files"] == len([*Path(ROOT, "moe_runtime").glob("*.py")])


def test_waits_that_overlap_the_stretch_count(monkeypatch):
    times = TokenTimes(2)
    for request, moment in [(0, 1.0), (1, 1.5), (0, 2.0), (1, 6.5), (0, 3.0), (0, 3.5)]:
        monkeypatch.setattr(time, "perf_counter", lambda moment=moment: moment)
        times.add(request)
    assert times.longest_wait_s(0.0, 10.0) == 5.0
    assert times.longest_wait_s(3.0, 3.2) == 5.0  # the second request waits all the while
    assert times.longest_wait_s(0.0, 1.2) == 1.0
    assert times.longest_wait_s(7.0, 9.0) == 0.0
