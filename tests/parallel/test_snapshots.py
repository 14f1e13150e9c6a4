"""Snapshots in memory: whose they are, and what happens where there is no room for one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from parallel_runs import interrupted, train, without_room
from rank_pool import RankPool
from training_runs import training_records, write_run

from moe_runtime.errors import CheckpointError, MoERuntimeWarning

EACH = ("run.snapshot_every=1", "run.checkpoint_every=0")


def test_a_snapshot_belongs_to_the_records_of_its_run(tmp_path, monkeypatch):
    """It survives a forgotten `--resume`, no other run takes it, and the end of the run frees it,
    also where that takes none."""
    path, out = str(write_run(tmp_path)), tmp_path / "out"
    memory = tmp_path / "machines" / "0"
    memory.parent.mkdir()
    monkeypatch.setattr("moe_runtime.training.snapshots.MEMORY", memory)
    assert interrupted(path, EACH, 4, str(memory.parent)) == ["step-00000004.shards"]
    with pytest.raises(CheckpointError, match=r"holds a run already .*step-00000004.shards"):
        train(path, EACH, 5)
    assert interrupted(path, EACH, 5, str(memory.parent)) == ["step-00000005.shards"]
    records = training_records(out)
    shutil.rmtree(out)
    with pytest.warns(MoERuntimeWarning, match=r"step-00000005.shards: is left out"):
        assert interrupted(path, EACH, 2, str(memory.parent)) == ["step-00000002.shards"]
    assert [record["step"] for record in training_records(out)] == [1, 2]
    train(path, ("run.checkpoint_every=0",), 8, resume=True)
    assert training_records(out)[: len(records)] == records
    assert not [*memory.iterdir()]


def test_a_run_goes_on_without_a_snapshot_that_finds_no_room(
    tmp_path: Path, ranks: Callable[[int], RankPool]
):
    """Of two processes the second finds none, once; one line says so, and nothing partial stays."""
    path = str(write_run(tmp_path))
    (warned, *held), (other, *_) = ranks(2).run(without_room, path, EACH, 1, str(tmp_path))
    (line,) = warned
    assert "step-00000002.shards: no snapshot was taken" in line
    assert "rank 1: [Errno 28]" in line
    assert other == []
    assert held == [["step-00000001.shards", "step-00000003.shards"]]
    assert [record["step"] for record in training_records(tmp_path / "out")][-1] == 3
