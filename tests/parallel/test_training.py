"""`train` in several processes: the losses of one, and checkpoints that any number goes on from."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parallel_runs import (
    failing_digests,
    final_parameters,
    interrupted,
    order_of_shortcut,
    refused,
    shared,
    smallest_budget,
    stalled,
    train,
    train_compiled,
    train_offloaded,
    train_with_links,
)
from rank_pool import RankFailed, RankPool
from safetensors.torch import load_file
from training_runs import CONFIG, training_records, write_run

from moe_runtime.parallel.placement_map import PlacementMap
from moe_runtime.policies.placement import Devices, Placement
from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.run_config import TrainConfig
from moe_runtime.training.tracing import signature_of_config

Ranks = Callable[[int], RankPool]
# A gate whose selection bias depends on the loads of all processes; shared experts; biases.
ROUTED = CONFIG.replace("micro_batches = 2", "micro_batches = 4").replace(
    "loss_weights = { load_balance = 0.01, z = 1e-3 }",
    'gate = "sigmoid_topk"\ngate_options = { bias_update_rate = 1e-2 }\nshared_experts = 1\n'
    "bias = true\nloss_weights = { load_balance = 0.01 }",
)
ROUTED = ROUTED.replace(
    "num_layers = 2", "num_layers = 3\ndense_layers = [1]\nintermediate_size = 24"
).replace("steps = 8", "steps = 10")
DEEPER = ROUTED.replace("num_layers = 3", "num_layers = 4")
SPLIT = {
    "copies and a sharded dense part": ("parallel.ep=1", "parallel.zero=3"),
    "gradients reduced once": ("parallel.zero=1", "parallel.overlap=2"),
    "gathered until the backward pass": ("parallel.zero=2", "parallel.transport=panels"),
    "experts moved by load": (
        "parallel.experts=rebalanced",
        "parallel.rebalance_every=1",
        "parallel.copies=2",
    ),
    "copies for a pass": ("parallel.experts=sparse", "parallel.copies=2"),
    "rows or weights travel": ("parallel.experts=switching",),
    "chosen": tuple(f"parallel.{name}=auto" for name in ("overlap", "transport", "experts")),
}


def assert_same_records(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """fp64, summed in another order; a few steps of AdamW make little of it more."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in ("loss", "aux_loss", "gradient_norm", "max_load", "held_out_mean"):
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=1e-6), (name, one)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of one process."""
    path = write_run(tmp_path_factory.mktemp("alone"), config=ROUTED)
    train(str(path), (), 8)
    return path


@pytest.fixture(scope="module")
def alone(trained: Path) -> Callable[[int], list[dict[str, Any]]]:
    """What one process records up to a step."""
    records = training_records(trained.parent / "out")
    return lambda until: [record for record in records if record["step"] <= until]


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = write_run(tmp_path_factory.mktemp("deeper"), config=DEEPER)
    train(str(path), (), 2)
    return training_records(path.parent / "out")


@pytest.mark.parametrize("split", SPLIT.values(), ids=SPLIT.keys())
def test_several_processes_train_what_one_does(split, alone, tmp_path, ranks):
    path = write_run(tmp_path, config=ROUTED)
    shares = ranks(2).run(train, str(path), split, 2)
    is_sharded = any("parallel.zero" in setting for setting in split)
    assert all(share < 0.7 if is_sharded else share == 1.0 for share in shares)
    assert_same_records(training_records(tmp_path / "out"), alone(2))


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_gradients_of_weights_after_those_of_inputs(schedule, deeper, tmp_path, ranks):
    """Stages of tied and of divided experts; zbv's first process has both ends."""
    split = ("parallel.pp=2", f"parallel.schedule={schedule}")
    ranks(2).run(train, str(write_run(tmp_path, config=DEEPER)), split, 2)
    assert_same_records(training_records(tmp_path / "out"), deeper)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_offloaded_activations_change_no_bit_and_take_no_memory(schedule, tmp_path, ranks):
    """The first of two stages, of four micro-batches: none, half, and all leave."""
    found, most = [], []
    for share in ("0.01", "0.5", "1.0"):
        path = write_run(tmp_path / share, config=DEEPER)
        split = ("parallel.pp=2", f"parallel.schedule={schedule}", f"parallel.offload={share}")
        most.append(ranks(2).run(train_offloaded, str(path), split, 1))
        found.append(training_records(tmp_path / share / "out"))
        assert not [*(tmp_path / share).rglob("activations*")]
    assert found[0] == found[1] == found[2]
    (none, last), (half, _), (every, last_again) = most
    assert every == 0
    # small tensors of all micro-batches are the same
    assert 0 <= 2 * half - none < none / 10
    # with 1f1b the last stage goes back at once
    assert (last_again == last) == (schedule == "1f1b")


GIVEN_LINKS = {
    "slow between machines": (1e-9, 7e-3, 1e6, "hierarchical, overlap 1; experts are rebalanced"),
    "slow to begin": (1e-3, 1e-3, 1e12, "experts are switching"),
}


@pytest.mark.parametrize("given", GIVEN_LINKS.values(), ids=GIVEN_LINKS.keys())
def test_a_run_takes_the_exchange_that_its_links_make_fastest(given, alone, tmp_path, ranks):
    """Four processes of two machines; experts move, and what is chosen is chosen anew each step."""
    *links, expected = given
    path = write_run(tmp_path, config=ROUTED)
    lines = ranks(4).run(train_with_links, str(path), *links, 3)
    assert all(line.endswith(expected) for line in lines), lines
    assert_same_records(training_records(tmp_path / "out"), alone(3))


def test_a_map_says_where_experts_lie(alone, tmp_path, ranks):
    """With copies, two of them in one process, and from a checkpoint on."""
    path = write_run(tmp_path, config=ROUTED)
    config = read_tree(TrainConfig, path)
    signature = signature_of_config(replace(config.model, vocab_size=300))
    layers = [[[3, 0, 0], [2, 1, 0]], [[0, 2, -1], [1, 3, 2]], [[0, 1, -1], [2, 3, -1]]]
    placement = Placement(expert_of_slot=np.array(layers).reshape(3, -1), num_experts=4, num_gpus=2)
    devices = Devices(num_nodes=1, gpus_per_node=2)
    placed = PlacementMap(
        signature=signature, devices=devices, placement=placement, algorithm="by hand"
    )
    placed.save(tmp_path / "map.json")
    for until in (1, 3):
        ranks(2).run(train, str(path), ("parallel.placement=map.json",), until, until > 1)
    assert_same_records(training_records(tmp_path / "out"), alone(3))
    other = ("parallel.placement=map.json", "parallel.ep=1")
    with pytest.raises(RankFailed, match="the placement map is for 2 ranks, there are 1"):
        ranks(2).run(train, str(path), other, 5, True)


def test_a_lost_machine_costs_one_step(alone, tmp_path, ranks):
    """Two machines of one process; the second is lost after step 5, the last checkpoint is of step
    3. What it had is in the memory of the first."""
    path = str(write_run(tmp_path, config=ROUTED))
    machines = tmp_path / "machines"
    machines.mkdir()
    each = ("run.snapshot_every=1",)
    held = ranks(2).run(interrupted, path, each, 5, str(machines))
    assert held == [["step-00000005.shards"]] * 2
    shutil.rmtree(machines / "1")
    # rank 1 begins with a memory that is empty, and takes a step less than is asked for again
    assert ranks(2).run(interrupted, path, each, 6, str(machines)) == [["step-00000006.shards"]] * 2
    saved = [found.name for found in (tmp_path / "out" / "checkpoints").iterdir()]
    assert "step-00000003.shards" in saved
    shutil.rmtree(machines / "1")
    # one process goes on alone, from what both had
    assert interrupted(path, each, 7, str(machines)) == ["step-00000007.shards"]
    assert_same_records(training_records(tmp_path / "out"), alone(7))
    # a damaged part is no snapshot: the checkpoint on the disk is
    part = next(machines.glob("*/*/*/*.distcp"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    ranks(2).run(interrupted, path, (), 7, str(machines))
    assert_same_records(training_records(tmp_path / "out"), alone(7))


SLICED: tuple[int, tuple[str, ...]] = (2, ("parallel.etp=2",))
MACHINES = (4, ("parallel.transport=hierarchical", "parallel.ranks_per_node=2"))
COPIED = (4, ("parallel.ep=2", "parallel.zero=3"))
HEADS = (4, ("parallel.tp=2", "parallel.zero=3", "parallel.ep=2"))
STAGES = (4, ("parallel.pp=2", "parallel.zero=3"))
STAGED_HEADS = (4, ("parallel.pp=2", "parallel.tp=2", "parallel.schedule=gpipe"))


@pytest.mark.parametrize(
    "splits",
    [
        [MACHINES, None, HEADS],
        pytest.param([None, COPIED, STAGES, SLICED, STAGED_HEADS], marks=pytest.mark.long),
    ],
)
def test_any_number_of_processes_goes_on(splits, alone, tmp_path, ranks):
    """Two machines, one process, and divided heads with FSDP2: a step of each, from the checkpoint
    before. The long ones have copies, stages and sliced experts."""
    path = str(write_run(tmp_path, config=ROUTED))
    for step, split in enumerate(splits, 1):
        if split is None:
            train(path, (), step, step > 1)
        else:
            shares = ranks(split[0]).run(train, path, split[1], step, step > 1)
            assert "parallel.zero=3" not in split[1] or all(share < 0.7 for share in shares)
    names = [found.name for found in sorted((tmp_path / "out" / "checkpoints").iterdir())]
    kinds = ["pt" if split is None else "shards" for split in splits[-2:]]
    first = len(splits) - 1
    assert names == [f"step-{first + i:08}.{kind}" for i, kind in enumerate(kinds)]
    assert_same_records(training_records(tmp_path / "out"), alone(len(splits)))


def test_stages_train_what_one_process_does(trained, alone, tmp_path, ranks):
    """Eight steps of short and of long sequences; uneven stages of divided experts, one of them
    with the tied embedding and one with its copy."""
    path = write_run(tmp_path, config=ROUTED)
    ranks(4).run(train, str(path), ("parallel.pp=2", "parallel.ep=2"), 8)
    assert_same_records(training_records(tmp_path / "out"), alone(8))
    found, expected = final_parameters(path), final_parameters(trained)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        moved = (found[name] - tensor).abs()
        assert float(moved.max()) <= 8 * 3e-5, name
        assert float(moved.median()) <= 1e-12, name


def test_several_processes_leave_the_model_that_one_leaves(tmp_path, ranks):
    """Divided into stages, and with their experts off memory."""
    exportable = CONFIG.replace("micro_batches = 2", "micro_batches = 4")
    models = []
    for split in ("", "parallel.pp=2", "run.host_memory=1GiB"):
        folder = tmp_path / (split.partition(".")[0] or "alone")
        path = str(write_run(folder, config=exportable))
        if split:
            ranks(2).run(train, path, ("run.steps=2", split), 2, False, True)
        else:
            train(path, ("run.steps=2",), 2, False, True)
        assert not list(folder.glob("out/experts/*.records"))
        models.append(load_file(folder / "out" / "model" / "model.safetensors"))
    for model in models[1:]:
        assert model.keys() == models[0].keys()
        for name, tensor in models[0].items():
            # Written as fp32.
            torch.testing.assert_close(model[name], tensor, rtol=1e-5, atol=1e-7)


AWAY = "run.host_memory=1GiB"
MOVING = ("parallel.experts=auto", "parallel.copies=1")
ZBV = ("parallel.pp=2", "parallel.schedule=zbv")
NEEDS_EXPERTS_THAT_MOVE = "(1) need experts that move, and auto leaves them static"
REFUSED = {
    ("research.frozen_share=0.5",): "the keys of [research] are for one process",
    ("data.micro_batches=1",): "data.micro_batches (1) must be a multiple of the 2 processes",
    (AWAY, "parallel.tp=2"): "run.host_memory and parallel.tp (2) do not go together yet",
    (AWAY, "parallel.zero=3"): "run.host_memory and parallel.zero do not go together yet",
    (AWAY, "parallel.ep=1"): "parallel.ep (1) would make 2 copies, leave it out",
    (AWAY, "parallel.overlap=2"): "parallel.experts must be static, overlap 1",
    (AWAY, "parallel.overlap=auto"): "parallel.experts must be static, overlap 1",
    (*MOVING, "parallel.ep=2"): NEEDS_EXPERTS_THAT_MOVE,
    (*MOVING, "parallel.ep=1"): NEEDS_EXPERTS_THAT_MOVE,
    ("parallel.transport=hierarchical",): "that divide the experts are not several machines of 2",
    ("parallel.experts=switching", "run.compile=true"): "compile and parallel.experts switching",
    ZBV: "with 2 stages for each process needs 4 of model.num_layers, got 3",
    (*ZBV, "model.num_layers=4", "parallel.zero=3"): "zbv takes the backward pass apart",
    ("parallel.ep=3",): "etp * ep * pp = 1 * 3 * 1 = 3 does not divide the 2 ranks",
    ("parallel.tp=2", "model.num_kv_heads=1"): "tp (2) must divide model.num_kv_heads (1)",
    ("parallel.pp=3",): "tp * cp * pp = 1 * 1 * 3 = 3 does not divide the 2 ranks",
    ("parallel.pp=2", "model.num_layers=1", "model.dense_layers=[0]"): (
        "parallel.pp (2) must be at most the model.num_layers (1)"
    ),
    ("parallel.pp=2", "data.micro_batches=1"): (
        "--set data.micro_batches=2, or take the schedule gpipe"
    ),
    ("parallel.pp=2", AWAY): "run.host_memory cannot be combined with parallel.pp (2)",
    ("parallel.cp=2", "data.short_context=1"): "must divide the sequences of 1 tokens",
    ("parallel.cp=2", "data.short_context=2"): "2 * parallel.cp (4) must divide the sequences",
}


def test_what_cannot_work_is_refused_before_anything(tmp_path, ranks):
    path = str(write_run(tmp_path, config=ROUTED))
    (messages, _) = ranks(2).run(refused, path, list(REFUSED))
    for settings, found in zip(REFUSED, messages, strict=True):
        assert REFUSED[settings] in found, settings


def without_traffic(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    moved = ("stall_s", "read_bytes", "written_bytes")
    return [{n: v for n, v in record.items() if n not in moved} for record in records]


def test_experts_off_memory_over_any_number_of_processes(alone, tmp_path, ranks):
    """Two processes with all experts on the disk, and one; and from one form of a checkpoint into
    every other."""
    path = str(write_run(tmp_path, config=ROUTED))
    (small, _) = ranks(2).run(smallest_budget, path)
    ranks(2).run(train, path, (f"run.host_memory={small}B",), 1)
    train(path, (AWAY,), 2, True)
    train(path, (), 3, True)
    ranks(2).run(train, path, (AWAY,), 4, True)
    ranks(2).run(train, path, ("parallel.ep=2",), 5, True)
    train(path, (AWAY,), 6, True)
    found = training_records(tmp_path / "out")
    assert any(record.get("read_bytes", 0) > 0 for record in found)
    assert_same_records(without_traffic(found), without_traffic(alone(6)))


@pytest.mark.long
@pytest.mark.parametrize("split", ["parallel.ep=2", "parallel.tp=2", "parallel.cp=2"])
def test_compiled_blocks_train_the_same(split, alone, tmp_path, ranks):
    path = write_run(tmp_path, config=ROUTED)
    assert min(ranks(2).run(train_compiled, str(path), (split,), 2)) > 0
    assert_same_records(training_records(tmp_path / "out"), alone(2))


def check_two_train_as_one(
    folder: Path, ranks: Ranks, config: str, split: str, *, steps: int
) -> None:
    """One process and two that divide the work train from the same configuration."""
    alone, together = (
        str(write_run(folder / name, config=config)) for name in ("alone", "together")
    )
    train(alone, (), steps)
    ranks(2).run(train, together, (split,), steps)
    assert_same_records(
        training_records(folder / "together" / "out"), training_records(folder / "alone" / "out")
    )


# Gates that look at more than one token's scores: capacity, sequences, the gate before, samples.
GATES = {
    "capacity and zero experts": "zero_experts = { zero = 1, copy = 1, constant = 2 }\n"
    "capacity_factor = 1.25",
    "hash": 'gate = "hash"\ngate_options = { vocab_size = 300 }',
    "sampled": 'gate = "rl_r"\ntop_k = 1',
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
def test_gates_see_all_tokens_of_divided_sequences(gate, tmp_path, ranks):
    config = CONFIG.replace("loss_weights = { load_balance = 0.01, z = 1e-3 }", gate)
    if "top_k = 1" in gate:
        config = config.replace("top_k = 2\n", "", 1)
    check_two_train_as_one(tmp_path, ranks, config, "parallel.tp=2", steps=2)


SHORTCUT = CONFIG.replace(
    "loss_weights = {", 'shortcut = "middle"\nshared_experts = 1\nloss_weights = {'
)
SHORTCUT = SHORTCUT.replace("num_layers = 2", "num_layers = 2\nintermediate_size = 24")


def test_rows_of_a_shortcut_travel_while_the_second_attention_computes(tmp_path, ranks):
    """In both passes: rows leave before it and arrive after it, and so do their gradients."""
    check_two_train_as_one(tmp_path, ranks, SHORTCUT, "parallel.ep=2", steps=2)
    path = str(write_run(tmp_path / "order", config=SHORTCUT))
    forward, backward = ["rows leave", "attention", "rows arrive"], ["gradients leave"]
    expected = [*forward, *backward, "attention's gradient", "gradients arrive"]
    assert ranks(2).run(order_of_shortcut, path) == [expected] * 2


def test_stages_pass_scores_on_and_compute_again(tmp_path, ranks):
    """MoE++'s gates read the scores of the gate before, which another stage has; blocks that are
    computed again add the gates' losses to the gradients once."""
    gate = 'gate = "moepp"\nzero_experts = { zero = 1, copy = 1, constant = 2 }'
    config = CONFIG.replace("loss_weights = { load_balance = 0.01, z = 1e-3 }", gate)
    # Two stages of one layer each, without ties between them.
    config = config.replace("num_layers = 2", "num_layers = 2\ntie_embeddings = false")
    config = config.replace("threads = 1", "threads = 1\nrecompute = true")
    check_two_train_as_one(tmp_path, ranks, config, "parallel.pp=2", steps=3)


def test_who_stalls_in_an_exchange_of_torch_is_named(tmp_path):
    """FSDP2's sharded weights and `torch.distributed.checkpoint`, both at once: each waits."""
    splits = {"step": ("parallel.ep=1", "parallel.zero=3"), "checkpoint": ("parallel.ep=1",)}
    pools = {where: RankPool(2) for where in splits}
    try:
        for where, split in splits.items():
            path = str(write_run(tmp_path / where, config=ROUTED))
            settings = (*split, "parallel.timeout_s=4", "run.steps=1")
            pools[where].start(stalled, path, settings, where, 1)
        found = {where: pool.collect() for where, pool in pools.items()}
    finally:
        for pool in pools.values():
            pool.close()
    # The others write in the background, and wait at the end of the step.
    for where, said in (("step", "(step 1)"), ("checkpoint", "(requests to stop)")):
        (is_ok, message), _ = found[where]
        assert is_ok, message
        assert message.startswith("rank 1 of 2 did not arrive within 4 s"), message
        assert said in message


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_checkpoint_that_one_rank_cannot_finish_fails_in_all(culprit, tmp_path, ranks):
    """At once, not when a barrier gives up; nothing is left that looks like a checkpoint."""
    path = write_run(tmp_path, config=ROUTED)
    lines = ranks(2).run(failing_digests, str(path), culprit)
    assert all("No space left on device: 'digests.json'" in line for line in lines)
    assert f"rank {culprit}: " in lines[1 - culprit]
    assert not [*(tmp_path / "out/checkpoints").iterdir()]


def test_a_folder_that_is_not_shared_is_refused_before_the_first_step(ranks, tmp_path):
    """As on two machines: the second has another folder of that name, or none."""
    path = str(write_run(tmp_path, config=ROUTED))
    one, other = tmp_path / "one", tmp_path / "other"
    assert ranks(2).run(shared, path, str(one), str(one)) == ["", ""]
    for apart in (other, tmp_path / "missing"):
        for line in ranks(2).run(shared, path, str(one), str(apart)):
            assert "rank 1 of 2 does not see what rank 0 writes there" in line
    assert [*one.iterdir()] == []
