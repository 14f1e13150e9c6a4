"""Snapshots in memory: whose they are, and what happens where there is no room for one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parallel_runs import interrupted, resumed, train, without_room
from rank_pool import RankPool
from training_runs import CONFIG, training_records, write_run

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


def tensors_of(snapshots: list[Path], folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a snapshot whose parts lie in several folders."""
    for snapshot in snapshots:
        shutil.copytree(snapshot, folder, dirs_exist_ok=True)
    kinds = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {name: torch.zeros(kind.size, dtype=torch.float64) for name, kind in kinds.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def test_a_lost_stage_begins_between_those_beside_it(tmp_path, ranks):
    """Three machines with a layer each: the middle one is lost, then the last, then the first."""
    config = CONFIG.replace("num_layers = 2", "num_layers = 3")
    path = str(write_run(tmp_path, config=config.replace("micro_batches = 2", "micro_batches = 4")))
    machines = tmp_path / "machines"
    machines.mkdir()
    settings = (*EACH, "run.lost_stage=neighbours", "parallel.pp=3")
    assert (
        ranks(3).run(interrupted, path, settings, 2, str(machines))
        == [["step-00000002.shards"]] * 3
    )
    kept = tmp_path / "kept"
    machines.rename(kept)
    before = tensors_of([*kept.glob("*/*/*")], tmp_path / "whole")
    ends = [
        sum(
            float(tensor.square().sum())
            for name, tensor in before.items()
            if name.startswith(f"exp_avg.blocks.{layer}.")
        )
        ** 0.5
        + 1e-4
        for layer in (0, 2)
    ]
    share = ends[0] / sum(ends)
    for lost, said in ((1, "a stage is lost"), (2, "last stage is lost"), (0, "its description")):
        shutil.copytree(kept, machines)
        shutil.rmtree(machines / str(lost))
        (step, *_, lines), *_ = found = ranks(3).run(resumed, path, settings, str(machines))
        assert said in lines[0]
        shutil.rmtree(machines)
        if lost != 1:
            assert step == 0
            continue
        assert step == 2
        for name, tensor in ((n, t) for _, own, _ in found for n, t in own.items()):
            expected = before[name]
            if ".blocks.1." in name:
                one, other = (before[name.replace("blocks.1.", f"blocks.{n}.")] for n in (0, 2))
                expected = share * one + (1 - share) * other
                if not name.startswith("model."):
                    expected = torch.zeros_like(one)
            torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-15)
