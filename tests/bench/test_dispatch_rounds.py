"""`bench dispatch`: bytes of the closed form, equal results, and a peer that differs is out."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from rank_followers import join_and_end, never_join
from warm_python import warm_python

from moe_runtime.benchmarks.cases import dispatch
from moe_runtime.benchmarks.suite import PeerFailedError, Rules, read_results
from moe_runtime.cli.main import main
from moe_runtime.errors import RankFailureError


def shape(load: str) -> dispatch.ExchangeShape:
    return dispatch.ExchangeShape(12, 8, 4, 2, load, "float32")


@pytest.mark.parametrize("load", ["balanced", "uniform", "zipf"])
def test_choices_of_a_token_differ_and_those_of_ranks_too(load):
    ids = shape(load).ids_TK(0)
    assert (ids[:, 0] != ids[:, 1]).all()
    assert (ids.min(), ids.max()) == (0, 3)
    assert not torch.equal(ids, shape(load).ids_TK(1))
    if load == "balanced":
        assert ids.flatten().bincount().tolist() == [6, 6, 6, 6]


class OneTokenOff:
    """Rounds that find one token of the comparison unequal."""

    plan = dispatch.DispatchBenchPlan(shapes=[shape("uniform")], rounds=1)

    def tell(self, what: str, number: int, side: str) -> list[float]:
        return [11.0]


def test_a_peer_whose_results_differ_has_no_numbers(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    with pytest.raises(PeerFailedError, match="1 of 12 tokens differ"):
        dispatch.DispatchSide("padded", OneTokenOff()).repeat()


def test_the_command_measures_two_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", warm_python())
    path = tmp_path / "r.json"
    words = ["--tokens", "12", "--dim", "8", "--experts", "4", "--load", "balanced,zipf"]
    words += ["--dtype", "float32", "--quick", "--time", "1", "--precision", "1"]
    before = torch.get_num_threads()
    try:
        assert main(["bench", "dispatch", *words, "-o", str(path), "--json"]) == 0
    finally:
        torch.set_num_threads(before)
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    assert (printed["settings"]["max_s"], printed["settings"]["precision"]) == (1.0, 1.0)
    ours, padded = printed["measurements"]
    assert ours["quality"] == padded["quality"] == {"compared": 48, "equal": 48}
    sent = [one["summary"]["balanced_float32_bytes"]["median"] for one in (ours, padded)]
    # Half of 12 * 2 rows of each rank leave it, of 8 * 4 bytes, there and back, on two ranks.
    assert sent == [12 * 8 * 4 * 2 * 2] * 2
    skewed = [one["summary"]["zipf_float32_bytes"]["median"] for one in (ours, padded)]
    assert skewed[0] < skewed[1]


PLAN = dispatch.DispatchBenchPlan(shapes=[shape("uniform")], rounds=1)


def test_a_rank_that_does_not_come_is_waited_for_until_the_limit(tmp_path):
    with pytest.raises(RankFailureError, match=r"^of 3 ranks 1, 2 did not join within 0.05 s$"):
        dispatch.meet(0, 3, str(tmp_path / "store"), lambda: None, 0.05)


@pytest.mark.long
def test_a_rank_that_cannot_start_is_named_with_its_last_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm_python())
    with (
        pytest.raises(RankFailureError, match=r"rank 1 of 2 ended: MemoryError: no room$"),
        dispatch.ranks_here(PLAN, 2, str(tmp_path / "store"), never_join),
    ):
        pytest.fail("the group was made")


@pytest.mark.long
def test_a_rank_that_dies_within_the_block_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm_python())
    others = set(psutil.Process().children())
    with (
        pytest.raises(RankFailureError, match=r"rank 2 of 3 ended: exit code 3$"),
        dispatch.ranks_here(PLAN, 3, str(tmp_path / "store"), join_and_end),
    ):
        dispatch.measure_dispatch(PLAN, Rules(judged=()), {})
    left = [one for one in set(psutil.Process().children()) - others if _follows(one)]
    assert left == []


def _follows(process: psutil.Process) -> bool:
    return "spawn_main" in " ".join(process.cmdline())


def test_an_interrupt_while_ranks_start_leaves_no_process_and_no_traceback(tmp_path):
    """All processes are of one terminal."""
    words = ["bench", "dispatch", "--ranks", "2", "--experts", "6"]
    code = f"import sys; from moe_runtime.cli.main import main; sys.exit(main({words}))"
    process = psutil.Popen(
        [sys.executable, "-P", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started: list[psutil.Process] = []
    while process.poll() is None and not started:
        started = [one for one in process.children() if _follows(one)]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "")
    assert not any(one.is_running() for one in started)
