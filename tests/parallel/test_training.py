"""`train` in several processes: the losses of one, and checkpoints that any number goes on from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_runs import refused, stalled, train, train_compiled
from rank_pool import RankPool
from training_runs import CONFIG, training_records, write_run

Ranks = Callable[[int], RankPool]
# A gate whose selection bias depends on the loads of all processes; shared experts; biases.
ROUTED = CONFIG.replace("micro_batches = 2", "micro_batches = 4").replace(
    "loss_weights = { load_balance = 0.01, z = 1e-3 }",
    'gate = "sigmoid_topk"\ngate_options = { bias_update_rate = 1e-2 }\nshared_experts = 1\n'
    "bias = true\nloss_weights = { load_balance = 0.01 }",
)
ROUTED = ROUTED.replace(
    "num_layers = 2", "num_layers = 3\ndense_layers = [1]\nintermediate_size = 24"
)
SPLIT = {
    "experts": (2, ("parallel.ep=2",)),
    "slices": (2, ("parallel.etp=2",)),
    "copies and a sharded dense part": (2, ("parallel.ep=1", "parallel.shard_dense=true")),
    "sequences and a sharded dense part": (2, ("parallel.cp=2", "parallel.shard_dense=true")),
    "heads, and the rest sharded": (
        4,
        ("parallel.tp=2", "parallel.shard_dense=true", "parallel.ep=2"),
    ),
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
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("alone"), config=ROUTED)
    train(str(path), (), 8)
    return path.parent / "out"


@pytest.mark.parametrize(("size", "split"), SPLIT.values(), ids=SPLIT.keys())
def test_several_processes_train_what_one_does(
    size: int, split: tuple[str, ...], alone: Path, tmp_path: Path, ranks: Ranks
) -> None:
    path = write_run(tmp_path, config=ROUTED)
    shares = ranks(size).run(train, str(path), split, 4)
    if "parallel.shard_dense=true" in split:
        assert all(share < 0.7 for share in shares)
    else:
        assert all((share < 1) == ("parallel.tp=2" in split) for share in shares)
    expected = [record for record in training_records(alone) if record["step"] <= 4]
    assert_same_records(training_records(tmp_path / "out"), expected)


def test_any_number_of_processes_goes_on(alone: Path, tmp_path: Path, ranks: Ranks) -> None:
    """One process, two with sliced experts, four with copies and FSDP2, four with divided heads,
    and one again."""
    path = str(write_run(tmp_path, config=ROUTED))
    train(path, (), 2)
    ranks(2).run(train, path, ("parallel.etp=2",), 4, True)
    four = ("parallel.ep=2", "parallel.shard_dense=true")
    ranks(4).run(train, path, four, 5, True)
    ranks(4).run(train, path, ("parallel.tp=2", "parallel.shard_dense=true"), 6, True)
    train(path, (), 7, True)
    ranks(2).run(train, path, (), 8, True)
    names = [found.name for found in sorted((tmp_path / "out" / "checkpoints").iterdir())]
    assert names == ["step-00000007.pt", "step-00000008.shards"]
    assert_same_records(training_records(tmp_path / "out"), training_records(alone))


def test_several_processes_leave_the_model_that_one_leaves(tmp_path: Path, ranks: Ranks) -> None:
    from safetensors.torch import load_file

    exportable = CONFIG.replace("micro_batches = 2", "micro_batches = 4")
    models = []
    for folder in ("one", "two"):
        path = str(write_run(tmp_path / folder, config=exportable))
        if folder == "one":
            train(path, ("run.steps=3",), 3, False, True)
        else:
            ranks(2).run(train, path, ("run.steps=3", "parallel.etp=2"), 3, False, True)
        models.append(load_file(tmp_path / folder / "out" / "model" / "model.safetensors"))
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        # Written as fp32.
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-5, atol=1e-7)


def test_what_cannot_work_is_refused_before_anything(tmp_path: Path, ranks: Ranks) -> None:
    path = str(write_run(tmp_path, config=ROUTED))
    (message, _) = ranks(2).run(refused, path, "data.micro_batches=1")
    assert "data.micro_batches (1) must be a multiple of the 2 processes" in message
    assert "--set data.micro_batches=2" in message
    (message, _) = ranks(2).run(refused, path, "parallel.ep=3")
    assert message == "etp * ep * pp = 1 * 3 * 1 = 3 does not divide the 2 ranks"
    (message, _) = ranks(2).run(refused, path, "parallel.tp=2", "model.num_kv_heads=1")
    assert message == "parallel.tp (2) must divide model.num_kv_heads (1)"
    (message, _) = ranks(2).run(refused, path, "parallel.cp=2", "data.short_context=1")
    assert message == "parallel.tp * parallel.cp (2) must divide the sequences of 1 tokens"


@pytest.mark.long
@pytest.mark.parametrize("split", ["parallel.ep=2", "parallel.tp=2", "parallel.cp=2"])
def test_compiled_blocks_train_the_same(
    split: str, alone: Path, tmp_path: Path, ranks: Ranks
) -> None:
    path = write_run(tmp_path, config=ROUTED)
    assert min(ranks(2).run(train_compiled, str(path), (split,), 2)) > 0
    expected = [record for record in training_records(alone) if record["step"] <= 2]
    assert_same_records(training_records(tmp_path / "out"), expected)


# Gates that look at more than one token's scores: capacity, sequences, the gate before, samples.
GATES = {
    "capacity and zero experts": "zero_experts = { zero = 1, copy = 1, constant = 2 }\n"
    "capacity_factor = 1.25",
    "hash": 'gate = "hash"\ngate_options = { vocab_size = 300 }',
    "sampled": 'gate = "rl_r"\ntop_k = 1',
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
def test_gates_see_all_tokens_of_divided_sequences(gate: str, tmp_path: Path, ranks: Ranks) -> None:
    config = CONFIG.replace("loss_weights = { load_balance = 0.01, z = 1e-3 }", gate)
    if "top_k = 1" in gate:
        config = config.replace("top_k = 2\n", "", 1)
    records = []
    for folder in ("one", "two"):
        path = str(write_run(tmp_path / folder, config=config))
        if folder == "one":
            train(path, (), 2)
        else:
            ranks(2).run(train, path, ("parallel.tp=2",), 2)
        records.append(training_records(tmp_path / folder / "out"))
    assert_same_records(records[1], records[0])


@pytest.mark.parametrize("where", ["step", "checkpoint"])
def test_who_stalls_in_an_exchange_of_torch_is_named(
    where: str, tmp_path: Path, ranks: Ranks
) -> None:
    """FSDP2's sharded weights and `torch.distributed.checkpoint`; no exchange of rows."""
    path = str(write_run(tmp_path, config=ROUTED))
    settings = ("parallel.ep=1", "parallel.shard_dense=true", "parallel.timeout_s=4", "run.steps=1")
    message, _ = ranks(2).run(stalled, path, settings, where, 1)
    assert message.startswith("rank 1 of 2 did not arrive within 4 s"), message
    assert ("(step 1)" if where == "step" else "(writing step-00000001.shards)") in message
