"""`bench latency` with real processes: ours on a tiny checkpoint, and peers of a few lines."""

import json
from pathlib import Path
from typing import Any

import pytest
from counted_energy import CountedEnergy
from warm_python import warm_python

from moe_runtime.benchmarks.cases.texts import TextPlan, likeliest, measure_texts
from moe_runtime.benchmarks.commands.shared import show_results
from moe_runtime.benchmarks.suite import PeerFailedError, Rules, read_results, write_results
from moe_runtime.benchmarks.suite.peers import (
    PeerProgram,
    describe_peer,
    find_peer,
    peer_file,
    peer_names,
    started,
)
from moe_runtime.cli.main import main

COUNTING = """
import sys, time
INSTALL = "pip install nothing"
PACKAGES = ("numpy",)
VARIANTS = ("odd", "dies")
class Peer:
    def __init__(self, settings):
        self.settings = settings
    def load(self):
        print("chatter on standard output")
        import slow_module
        if self.settings["variant"] == "dies":
            raise MemoryError("no room for it")
    def prefill(self, ids):
        self.total = sum(ids)
        return self.total % 97
    def step(self, token):
        self.total += token
        return (self.total + (self.settings["variant"] == "odd")) % 97
    def close(self):
        pass
"""


def program(folder: Path, variant: str | None = None) -> PeerProgram:
    (folder / "slow_module.py").touch()
    path = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    (folder / "counting.py").write_text(path + COUNTING)
    asked = str(folder / "counting.py") + (f":{variant}" if variant else "")
    return find_peer(asked, {"num_threads": 1})


def measure(folder: Path, *variants: str, agreement: float = 0.9) -> dict[str, Any]:
    plan = TextPlan(
        case="latency",
        batches=[[[3, 5]], [[60, 70, 1]]],
        num_new=4,
        agreement=agreement,
        timeout_s=600,
    )
    rules = Rules(judged=("first_token_s",), least=1, most=1)
    peers = [program(folder, variant) for variant in variants]
    return measure_texts(program(folder), peers, plan, rules, settings={})


def test_a_peer_that_says_otherwise_or_dies_gets_no_numbers(tmp_path):
    ours, odd, dies = measure(tmp_path, "odd", "dies")["measurements"]
    assert ours["failure"] is None
    assert ours["quality"] == {"compared": 8, "equal": 8}
    (found,) = ours["repetitions"]
    assert (len(found["first_token_s"]), len(found["between_tokens_s"])) == (2, 6)
    # Every step of the odd one is one off; its two first tokens are right.
    assert (odd["quality"], odd["repetitions"]) == ({"compared": 8, "equal": 2}, [])
    assert "2 of 8 likeliest tokens equal" in odd["failure"]
    said = "MemoryError: no room for it (counting.py, line 14)"
    assert (dies["failure"], dies["summary"]) == (said, {})


def test_where_ours_fails_there_is_nothing_to_compare_with(tmp_path):
    plan = TextPlan(case="latency", batches=[[[3]]], num_new=2, timeout_s=600)
    rules = Rules(judged=("first_token_s",), least=1, most=1)
    with pytest.raises(PeerFailedError, match=r"^counting:dies: MemoryError: no room for it \("):
        measure_texts(program(tmp_path, "dies"), [], plan, rules, settings={})


def test_text_that_is_given_is_what_all_are_given(tmp_path):
    """In place of what this project finds likeliest; a peer of its own text has no numbers."""
    path = program(tmp_path).file
    generating = tmp_path / "generating.py"
    generating.write_text(path.read_text() + "    def stream(self, ids, num_new): return []\n")
    plan = TextPlan(
        case="latency",
        batches=[[[3, 5]], [[60, 70, 1]]],
        num_new=3,
        timeout_s=600,
        continuations=[[[10, 20, 30]], [[40, 50, 60]]],
    )
    rules = Rules(judged=("first_token_s",), least=1, most=1)
    peers = [find_peer(str(generating), {"num_threads": 1}), program(tmp_path, "odd")]
    results = measure_texts(program(tmp_path), peers, plan, rules, settings={})
    ours, generates, odd = results["measurements"]
    assert ours["quality"] == {"compared": 6, "equal": 6}
    assert "generates by itself" in generates["failure"]
    assert odd["quality"] == {"compared": 6, "equal": 2}
    # sums of what was read, the given tokens among them: 8, 18, 38 and 131, 171, 221
    assert likeliest(program(tmp_path), plan) == [[[8, 18, 38]], [[34, 74, 27]]]


def test_imports_are_no_part_of_loading(tmp_path):
    """By the clock of the peer the module takes 300 s, which is asked for within `load`."""
    peer = program(tmp_path)
    late = "import time\nreal = time.perf_counter\ntime.perf_counter = lambda: real() + 300.0\n"
    (tmp_path / "slow_module.py").write_text(late)
    with started(peer, 600.0) as process:
        process.ask("start", settings={"variant": None})
        found = process.ask("load")
    assert found["import_s"] >= 300.0
    assert found["load_s"] < 300.0


def test_memory_is_that_of_a_peers_processes_together(tmp_path):
    """An engine in a process of its own holds 200 MiB, which are not part of the peer's."""
    engine = "held = b'1' * (200 << 20); print(flush=True); input()"
    run = f"""
        import subprocess
        run = {{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}}
        self.engine = subprocess.Popen([sys.executable, "-c", {engine!r}], **run)
        self.engine.stdout.readline()
"""
    peer = program(tmp_path)
    file = tmp_path / "counting.py"
    file.write_text(file.read_text().replace("        import slow_module\n", run))
    with started(peer, 600.0) as process:
        before = process.ask("start", settings={"variant": None})["rss_after_imports_bytes"]
        process.ask("load")
        assert process.ask("end")["peak_rss_bytes"] - before >= 200 << 20


def test_a_peer_that_does_not_answer_is_ended(tmp_path):
    peer = program(tmp_path)
    (tmp_path / "counting.py").write_text("import time; time.sleep(600)")
    with started(peer, 0.001) as process, pytest.raises(PeerFailedError, match="after"):
        process.ask("start", settings={"variant": None})


def test_every_peer_of_the_package_says_how_to_install_it_in_60_lines():
    assert {"transformers", "llama_cpp"} <= set(peer_names())
    for name in peer_names():
        file = peer_file(name)
        assert describe_peer(file)["INSTALL"].startswith("pip install ")
        assert len(file.read_text().splitlines()) <= 60


@pytest.mark.parametrize("line", ["DEVICES = 7", "VARIANTS = (1,)", 'PACKAGES = "torch"'])
def test_a_constant_of_another_type_is_refused_by_its_name(line, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f'INSTALL = "pip install mine"\nPACKAGES = ("mine",)\n{line}\n')
    name = line.partition(" ")[0]
    with pytest.raises(ValueError, match=rf"mine\.py: {name} must be a "):
        find_peer(str(file), {"device": "cpu"})


def test_the_command_measures_us_beside_transformers(tmp_path, capsys, monkeypatch):
    """A whole run on a tiny checkpoint: file and `--json` agree, the user's cache is left alone."""
    from text_checkpoint import save_text_checkpoint

    save_text_checkpoint(tmp_path / "model")
    (tmp_path / "p.txt").write_text("The store\nreads an expert\n")
    path = tmp_path / "r.json"
    words = ["--prompts", str(tmp_path / "p.txt"), "--quick", "--time", "1", "--threads", "1"]
    monkeypatch.setattr(
        "moe_runtime.benchmarks.suite.peers.this_python", lambda: Path(warm_python())
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words += ["--peer", "transformers", "--peer", "moe_runtime", "-o", str(path), "--json"]
    assert main(["bench", "latency", str(tmp_path / "model"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    assert not (tmp_path / "cache").exists()
    assert (printed["case"], printed["ended"]) == ("latency", "time")
    assert printed["settings"]["new_tokens"] == 16
    names = [one["system"] for one in printed["measurements"]]
    assert names == ["moe_runtime", "transformers", "moe_runtime#2"]
    for one in printed["measurements"]:
        assert one["quality"]["equal"] >= 0.9 * one["quality"]["compared"] == 0.9 * 32
        assert one["summary"]["first_token_s"]["p50"] > 0
        assert one["versions"]["torch"]
        found = one["repetitions"][0]
        assert found["peak_rss_bytes"] > found["rss_after_imports_bytes"] > 0


def test_joules_are_those_of_the_answers(tmp_path, monkeypatch, capsys):
    """Of the text, not of imports, loading, or the untimed answer before."""
    counted, answer = [0.0], TextPlan.ask

    def answer_and_count(*asked: Any) -> Any:
        counted[0] += 2.5
        return answer(*asked)

    meter = CountedEnergy(lambda: counted[0])
    monkeypatch.setattr("moe_runtime.benchmarks.cases.texts.EnergyMeter", lambda: meter)
    monkeypatch.setattr(TextPlan, "ask", answer_and_count)
    results = measure(tmp_path)
    (one,) = results["measurements"]
    assert [found["cpu_joules"] for found in one["repetitions"]] == [5.0]
    joules = one["summary"]["cpu_joules"]
    assert (joules["unit"], joules["better"], joules["median"]) == ("J", "less", 5.0)
    assert "gpu_joules" not in one["summary"]
    path = tmp_path / "r.json"
    write_results(path, results)
    show_results(results)
    shown = capsys.readouterr().out
    assert "cpu, J" in shown
    assert "gpu, J" not in shown
    assert main(["bench", "compare", str(path), str(path)]) == 0
    assert "cpu_joules" in capsys.readouterr().out
    table = tmp_path / "r.csv"
    page = ["-o", str(tmp_path / "r.html"), "--csv", str(table)]
    assert main(["bench", "report", str(path), *page]) == 0
    assert "latency,,counting,cpu_joules,1,J,less,True,5.0" in table.read_text()
