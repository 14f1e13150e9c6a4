"""`bench io`: what is read is what the file holds, whoever reads; who brings other bytes is out."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import quantized_checkpoints
import torch
from text_checkpoint import save_text_checkpoint

from moe_runtime.benchmarks.cases.io import PlainReads, ReadPlan, make_read_systems
from moe_runtime.benchmarks.suite import PeerFailedError, read_results
from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.cli.main import main
from moe_runtime.memory.source import Slab
from moe_runtime.types import ExpertKey


def plan_of(folder: Path, num_experts: int, in_flight: int) -> ReadPlan:
    checkpoint = open_checkpoint(folder, "auto")
    layouts = map_experts(build_on_meta(checkpoint), checkpoint).layouts
    return ReadPlan(layouts=layouts, num_experts=num_experts, in_flight=in_flight, io_threads=2)


class WrongReads(PlainReads):
    """Flips a bit of an expert that it read."""

    def read(self, keys: Sequence[ExpertKey]) -> tuple[dict[ExpertKey, torch.Tensor], list[float]]:
        lies, took_s = super().read(keys)
        key, slot = next(iter(lies.items()))
        view = self.plan.layouts[key].views(slot)[0]
        view.view(torch.int32)[0, 0] ^= 1
        return lies, took_s


def test_one_bit_more_or_less_is_no_number(tmp_path):
    save_text_checkpoint(tmp_path / "model")
    plan = plan_of(tmp_path / "model", 2, 1)
    slab = Slab(1, max(one.slot_bytes for one in plan.layouts.values()))
    sound = PlainReads("sound", plan, slab, direct=False)
    assert len(sound.repeat()["expert_read_s"]) == 2  # type: ignore[arg-type]
    wrong = WrongReads("wrong", plan, slab, direct=False)
    with pytest.raises(PeerFailedError, match="1 of 3 tensors differ from those of the file"):
        wrong.repeat()
    assert (wrong.compared, wrong.equal) == (3, 2)


def test_numbers_put_in_order_meanwhile_are_compared_in_that_order(tmp_path):
    """Files of AWQ hold codes and zeros in an order that no product reads."""
    (awq,) = (one for one in quantized_checkpoints.SAMPLES if one.name.endswith("awq"))
    plan = plan_of(quantized_checkpoints.write(awq, tmp_path).folder, 2, 1)
    assert all(layout.reorderings for layout in plan.layouts.values())
    with make_read_systems(plan) as systems:
        for system in systems:
            system.repeat()
            assert system.equal == system.compared > 3


def test_systems_read_the_same_experts_and_a_short_file_is_said(tmp_path):
    save_text_checkpoint(tmp_path / "model")
    plan = plan_of(tmp_path / "model", 3, 2)
    assert plan.keys(4) == plan.keys(4) != plan.keys(5)
    assert len(set(plan.keys(4))) == 3
    with make_read_systems(plan) as systems:
        for system in systems:
            found = system.repeat()
            assert len(found["expert_read_s"]) == 3  # type: ignore[arg-type]
            # a thread that comes late finds nothing to read: then only one slot holds an expert
            assert system.equal == system.compared
            assert system.compared in (3, 6)
    (file,) = {extent.file for one in plan.layouts.values() for extent in one.extents}
    with file.open("r+b") as shorter:
        shorter.truncate(min(e.offset for one in plan.layouts.values() for e in one.extents))
    with make_read_systems(plan) as systems:
        for system in systems:
            with pytest.raises(PeerFailedError, match="the file ends"):
                system.repeat()


def test_the_command_reads_experts(tmp_path, capsys):
    path = tmp_path / "r.json"
    save_text_checkpoint(tmp_path / "model")
    words = ["--experts", "3", "--in-flight", "2", "--quick", "--time", "1"]
    words += ["--precision", "1", "-o", str(path), "--json"]
    assert main(["bench", "io", str(tmp_path / "model"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    layouts = plan_of(tmp_path / "model", 3, 2).layouts.values()
    assert printed["settings"]["expert_bytes"] == [next(iter(layouts)).tensor_bytes]
    most = 3 * max(sum(extent.needed_bytes for extent in one.extents) for one in layouts)
    for one in printed["measurements"]:
        assert one["quality"]["equal"] == one["quality"]["compared"] > 0
        for found in one["repetitions"]:
            # Two are on their way at any time: their times add up to twice the whole at most.
            assert len(found["expert_read_s"]) == 3
            assert sum(found["expert_read_s"]) <= 2 * most / found["bytes_per_s"]
