"""Experts off the device, divided among processes: the bits of one, a share of the reads."""

import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from parallel_load import (
    balanced,
    divided,
    gradients,
    half_loaded,
    moved,
    outputs,
    refusal,
    refusal_of,
    shared,
    too_many,
)
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from text_checkpoint import NUM_EXPERTS, NUM_LAYERS, TOP_K, tiny_text_model

import moe_runtime
from moe_runtime.errors import CheckpointError, MoERuntimeWarning
from moe_runtime.inference.expert_partition import ExpertPartition, add_up
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.parallel.communication.transport import LocalTransport
from moe_runtime.parallel.placement_map import PlacementMap
from moe_runtime.policies.placement import Devices, Placement
from moe_runtime.types import ExpertKey, ModelSignature

Ranks = Callable[[int], RankPool]


def assert_same(together: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for theirs in together:
        assert torch.equal(theirs["logits"], alone["logits"])
        assert torch.equal(theirs["tokens"], alone["tokens"])


class Several(LocalTransport):
    """One of several processes, which is not sent anything."""

    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize("size", [2, 3])
def test_processes_give_the_bits_of_one(size, checkpoint, ranks):
    smallest = inspect_checkpoint(checkpoint, max_tokens=64).smallest_budget_bytes
    options: dict[str, Any] = {"host_memory": smallest + 400_000}
    if size == 2:
        options |= {"prefetch": "enforce", "dtype": "bfloat16"}
    alone = outputs(str(checkpoint), options)
    together = ranks(size).run(outputs, str(checkpoint), options)
    assert_same(together, alone)
    # Every visit of an expert is one process's: nobody computes what another one does.
    parts = [theirs["stats"] for theirs in together]
    assert sum(map(visits, parts)) == visits(alone["stats"])
    assert all(0 < part.bytes_read < alone["stats"].bytes_read for part in parts)


def test_processes_give_the_gradients_of_one(checkpoint, ranks):
    """To the bit; what only one process would know of is refused."""
    smallest = inspect_checkpoint(checkpoint, max_tokens=64).smallest_budget_bytes
    options: dict[str, Any] = {"host_memory": smallest + 400_000}
    *alone, answer = gradients(str(checkpoint), options)
    assert not answer
    for *together, answer in ranks(2).run(gradients, str(checkpoint), options):
        assert all(map(torch.equal, together, alone))
        assert "several processes cannot train" in answer
        assert "\n" not in answer


@pytest.mark.parametrize("kind", ["qwen3_moe-fp8-ragged", "qwen3_moe-int4-zeros", "planes"])
def test_quantised_and_packed_experts_are_divided_too(kind, checkpoint_in, ranks):
    """Each process reads its own, and computes what one process computes from the same codes."""
    folder = checkpoint_in(kind)
    smallest = inspect_checkpoint(folder, max_tokens=64).smallest_budget_bytes
    options: dict[str, Any] = {"host_memory": smallest}
    alone = outputs(str(folder), options)
    together = ranks(2).run(outputs, str(folder), options)
    assert_same(together, alone)
    assert all(0 < r["stats"].bytes_read < alone["stats"].bytes_read for r in together)
    *expected, _ = gradients(str(folder), options)
    for *found, _ in ranks(2).run(gradients, str(folder), options):
        assert all(map(torch.equal, found, expected))


def test_processes_of_a_machine_hold_dense_weights_once(checkpoint, ranks):
    """Each counts its part of them, and a change stays in the process that makes it."""
    stored = load_file(checkpoint / "model.safetensors")
    first, second = ranks(2).run(shared, str(checkpoint))
    whole = inspect_checkpoint(checkpoint, max_tokens=64).dense_bytes
    for found in (first, second):
        assert found["memories"] == 1
        assert all(torch.equal(w, stored[name]) for name, w in found["weights"].items())
        facts = found["facts"]
        assert facts.dense_bytes == whole
        assert facts.host_plan.dense_bytes == whole - facts.elsewhere_bytes == -(-whole // 2)
    assert first["changed"] == []
    assert second["changed"] == ["lm_head.weight"]


def test_processes_with_less_memory_hold_fewer_experts(checkpoint, ranks):
    """In proportion, if not all experts fit."""
    found = inspect_checkpoint(checkpoint, max_tokens=64)
    sizes = [found.smallest_budget_bytes + slots * found.slot_bytes for slots in (1, 7)]
    alone = outputs(str(checkpoint), {"host_memory": sizes[0]})
    options = [{"host_memory": size} for size in sizes]
    together = ranks(2).run(divided, str(checkpoint), options, ["one", "two"])
    assert_same(together, alone)
    assert [found["held"] for found in together] == [6, 18]


def test_a_faster_machine_holds_more_of_what_fits(checkpoint, ranks):
    alone = outputs(str(checkpoint), {})
    together = ranks(2).run(divided, str(checkpoint), [{}, {}], ["one", "two"])
    assert_same(together, alone)
    assert [found["held"] for found in together] == [8, 16]
    together = ranks(2).run(divided, str(checkpoint), [{}, {}], ["one", "one"])
    assert [found["held"] for found in together] == [12, 12]


def test_the_routing_of_a_run_balances_the_next_one(checkpoint, tmp_path, ranks):
    """The first process keeps it. Hot experts have copies, since all experts fit."""
    alone = outputs(str(checkpoint), {})
    together = ranks(2).run(balanced, str(checkpoint), str(tmp_path))
    for runs in zip(*(runs for runs, *_ in together), strict=True):
        assert_same([*runs], alone)
    assert [kept for *_, kept in together] == [["routing"], []]
    for _, ((no_loads, _), (loads_LE, num_copies)), _ in together:
        assert no_loads is None
        assert loads_LE.tolist() == together[0][1][1][0].tolist()
        # of each token that was decoded one by one
        assert loads_LE.sum(axis=1).tolist() == [10 * TOP_K] * NUM_LAYERS
        assert num_copies == NUM_EXPERTS // 8


@pytest.mark.parametrize("fits", [False, True])
def test_experts_move_while_loads_change(fits, checkpoint, tmp_path, ranks):
    options: dict[str, Any] = {"dtype": "bfloat16"}
    if not fits:
        smallest = inspect_checkpoint(checkpoint, max_tokens=64).smallest_budget_bytes
        options["host_memory"] = smallest + 100_000
    alone = outputs(str(checkpoint), options)
    (first, looks), (second, same) = ranks(2).run(moved, str(checkpoint), str(tmp_path), options)
    assert_same([first, second], alone)
    assert visits(first["stats"]) + visits(second["stats"]) == visits(alone["stats"])
    assert len(looks) == 4
    assert looks == same
    assert looks[0] != [[[0]] * 4 + [[1]] * 4] * NUM_LAYERS
    for holders in (layer for look in looks for layer in look):
        assert sorted(rank for (rank,) in holders) == [0] * 4 + [1] * 4


def test_a_placement_map_changes_no_bit(checkpoint, tmp_path, ranks):
    """Experts anywhere, some of them twice, a layer all on one process."""
    slots = np.array(
        [
            [7, 1, 5, 0, 2, -1, 6, 3, 4, 5, 1, 2],
            [0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1],
            [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3],
        ]
    )
    path = tmp_path / "map.json"
    placed(slots, 2).save(path)
    alone = outputs(str(checkpoint), {})
    assert_same(ranks(2).run(outputs, str(checkpoint), {"placement": str(path)}), alone)
    with pytest.raises(CheckpointError, match="the placement map is for 2 ranks, there are 1"):
        outputs(str(checkpoint), {"placement": str(path)})


def placed(slots: np.ndarray, num_ranks: int) -> PlacementMap:
    """A map of the tiny model."""
    signature = ModelSignature(
        model_type="olmoe",
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        vocab_size=300,
    )
    return PlacementMap(
        signature=signature,
        devices=Devices(num_nodes=1, gpus_per_node=num_ranks),
        placement=Placement(
            expert_of_slot=slots, num_experts=signature.num_experts, num_gpus=num_ranks
        ),
        algorithm="by hand",
    )


def test_one_process_says_that_a_map_has_no_effect(checkpoint, tmp_path):
    slots = np.tile(np.arange(NUM_EXPERTS), (NUM_LAYERS, 1))
    placed(slots, 1).save(tmp_path / "map.json")
    with pytest.warns(MoERuntimeWarning, match=r"placement map has no effect: [^\n]+$"):
        model = moe_runtime.load(
            checkpoint, device="cpu", max_tokens=64, placement=tmp_path / "map.json"
        )
    model.moe.close()


def test_an_expert_with_copies_goes_where_the_fewest_rows_are():
    transport = Several(2)
    slots = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]] * 3)
    share = ExpertPartition(transport, [8] * 3, placed(slots, 2))
    # Five rows are rank 1's alone; of the copies the largest go to rank 0 until it has as many.
    rows = {0: [0, 1], 1: [2, 3, 4], 2: [5], 6: [6, 7, 8, 9, 10], 3: [11]}
    assert share.own_rows(0, rows) == {0: rows[0], 1: rows[1], 2: rows[2]}
    transport.rank = 1
    assert share.own_rows(0, rows) == {6: rows[6], 3: rows[3]}


def test_a_map_that_leaves_a_process_idle():
    slots = np.array([[*range(8), *[-1] * 8]] * 3)
    with pytest.raises(ValueError, match="leaves process 1 of 2 without experts"):
        ExpertPartition(Several(2), [8] * 3, placed(slots, 2))


def visits(stats: Any) -> int:
    return stats.hits + stats.late_hits + stats.misses


def test_a_process_that_loads_something_else_is_named(checkpoint, ranks):
    results = ranks(3).run(refusal, str(checkpoint), 1)
    assert [named for _, named in results] == [(1,), (0, 2), (1,)]
    assert results[0][0].startswith("ranks disagree about the dtype (its checksum): rank 1 has")


def test_experts_of_another_type_are_another_model(checkpoint, tmp_path, ranks):
    """Else the experts of one process would be rounded, or quantised, and those of others not."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    rounded = {n: t.bfloat16() if ".experts." in n else t for n, t in tensors.items()}
    save_file(rounded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    messages = ranks(2).run(refusal_of, [str(checkpoint), str(tmp_path)])
    assert all("the types of the model's experts" in message for message in messages)


def test_more_processes_than_experts(tmp_path, ranks):
    model = tiny_text_model(40)
    model.config.num_experts = model.config.num_experts_per_tok = 2
    type(model)(model.config).save_pretrained(tmp_path)
    messages = ranks(3).run(too_many, str(tmp_path))
    assert messages == ["3 processes cannot share the 2 experts of a layer; start at most 2"] * 3


def test_shares_are_runs_of_equal_length():
    transport = Several(3)
    share = ExpertPartition(transport, [8])
    owners = []
    for expert in range(8):
        held = []
        for rank in range(3):
            transport.rank = rank
            held += [rank] * share.owns(ExpertKey(0, expert))
        owners += held
    assert owners == [0, 0, 0, 1, 1, 1, 2, 2]


def test_statistics_add_up(checkpoint):
    stats = outputs(str(checkpoint), {})["stats"]
    slower = dataclasses.replace(stats, stall_s=stats.stall_s + 1.0)
    both = add_up([stats, slower])
    assert both.misses == 2 * stats.misses
    assert both.bytes_read == 2 * stats.bytes_read
    assert both.stall_s == slower.stall_s
    assert both.expert_bytes == stats.expert_bytes


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_process_without_shared_weights_does_not_wait_for_them(is_killed, checkpoint, ranks):
    pool = ranks(2)
    (_, first), (_, second) = pool.try_run(half_loaded, str(checkpoint), is_killed)
    assert first == ("rank 0 ended" if is_killed else "damaged")
    assert second == "rank 0 did not load the dense weights that this process shares"
    if is_killed:
        pool.close()
