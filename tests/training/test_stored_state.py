"""Every file of state that was written x what may become of it: right values, or one line.

The line names the file. What a run goes on with is compared with what the whole file gives.
"""

import dataclasses
import io
import json
import random
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from synthetic_routes import make_routes
from torch import Tensor
from training_runs import CONFIG, error_of, train, training_records, write_run

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.checkpoints.adapter_files import AdapterFolder
from moe_runtime.cli.main import describe
from moe_runtime.digests import write_digests
from moe_runtime.errors import CheckpointError, MoERuntimeWarning
from moe_runtime.files import locked
from moe_runtime.lab.traces.learned import (
    keep_learned,
    read_predictor,
    restore_learned,
    write_predictor,
)
from moe_runtime.parallel.placement_map import PlacementMap, load_placement_map
from moe_runtime.policies.eviction.learned import ActivationMatrices
from moe_runtime.policies.placement import EPLB, Devices, RoutingProfile
from moe_runtime.policies.prediction import Shape, make_estimator
from moe_runtime.training.checkpoint import (
    RunProgress,
    load_content,
    on_host,
    random_states,
    write_content,
)
from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.optimizer import state_order
from moe_runtime.training.prepared import run_folder
from moe_runtime.training.ranks import OneRank
from moe_runtime.training.run_config import TrainConfig
from moe_runtime.training.sharded import ShardedCheckpoints, read_progress, whole_model
from moe_runtime.training.train_run import Preparation, prepare, start
from moe_runtime.types import ModelSignature

SMALL = CONFIG.replace("checkpoint_every = 3", "checkpoint_every = 0").replace(
    "tokens_per_step = 256", "tokens_per_step = 64"
)
STEPS = ("run.steps=4",)
OFFLOADED = (*STEPS, "run.host_memory=256MiB")
SIGNATURE = ModelSignature(model_type="x", num_layers=3, num_experts=8, top_k=2, vocab_size=99)


class Stored:
    """Files that were written, and what they give when they are read.

    Args:
        folder: with the files.
        read: from the folder, through the door that a user has.
    """

    def __init__(self, folder: Path, read: Callable[[Path], Any]) -> None:
        self.folder = folder
        self._read = read
        self.right = self.content(read(folder))

    def content(self, value: Any) -> Any:
        """The same values as lists, for comparison."""
        if isinstance(value, Mapping):
            return {name: self.content(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.content(part) for part in value]
        if isinstance(value, TrainedElsewhere):
            return repr(value)
        return value.tolist() if isinstance(value, Tensor | np.ndarray) else value

    def outcome(self, scratch: Path, name: str, content: bytes, *allowed: Any) -> str:
        """Reads a copy in which a file has another content: "" if it is right, or the line."""
        copy = scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy)
        (copy / name).write_bytes(content)
        try:
            found = self.content(self._read(copy))
        except Exception as error:
            code, line = describe(error)
            assert code == 2, line
            assert "\n" not in line
            assert Path(name).name in line
            return line
        assert found in allowed, f"{name} was accepted with other values"
        return ""


Runs = dict[str, tuple[Stored, Stored]]


def preparation_of(folder: Path, settings: tuple[str, ...]) -> Preparation:
    return prepare(read_tree(TrainConfig, folder / "train.toml", settings=settings), folder)


def resumed(folder: Path, settings: tuple[str, ...] = STEPS) -> dict[str, Any]:
    """Everything that further steps depend on."""
    preparation = preparation_of(folder, settings)
    trainer = start(preparation, resume=True)
    optimizer: Any = trainer.optimizer
    try:
        state = optimizer.state_dict()
        if "experts" in state:
            trainer.optimizer.wait()
            state = state["dense"]
            state["experts"] = [optimizer.stacked(layer) for layer in range(2)]
        return {
            "model": on_host(preparation.model.state_dict()),
            "optimizer": state.get("state", state),
            "experts": state.get("experts"),
            "position": preparation.batches.taken,
            "random": torch.get_rng_state(),
            "text": {n: [s.training, s.held_out] for n, s in preparation.streams.items()},
            "progress": [trainer.step, trainer.tokens, trainer.elapsed_s],
            "records": training_records(preparation.output),
        }
    finally:
        trainer.close()


def run_of(folder: Path, settings: tuple[str, ...], seed: int = 0) -> Path:
    """A run that was stopped after its second step."""
    path = write_run(folder, config=SMALL.replace("steps = 8", f"steps = 8\nseed = {seed}"))
    preparation = preparation_of(folder, settings)
    trainer = start(preparation, resume=False)
    trainer.train(should_stop=lambda: trainer.step == 2, on_record=lambda record: None)
    trainer.close()
    return path.parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs with experts in memory and off it, and for each a run with another seed."""
    found = {}
    for name, settings in (("memory", STEPS), ("offloaded", OFFLOADED)):
        one, other = (
            Stored(
                run_of(tmp_path_factory.mktemp(name), settings, seed),
                partial(resumed, settings=settings),
            )
            for seed in (0, 1)
        )
        found[name] = one, other
    return found


def sharded_of(folder: Path, seed: int) -> Path:
    """The folder of several processes, written by one."""
    preparation = preparation_of(run_of(folder, STEPS, seed), STEPS)
    trainer = start(preparation, resume=True)
    optimizer: Any = trainer.optimizer
    names = state_order(dict(preparation.model.named_parameters()))
    shards = ShardedCheckpoints(preparation.model, optimizer, OneRank(), names)
    progress = RunProgress(
        step=2, tokens=128, elapsed_s=1.0, taken=(1, 3), random=random_states(), settings={}
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        shards.save(folder / "files", progress, keep=1)
        shards.saves.wait()
    shards.saves.close()
    trainer.close()
    shutil.copy(folder / "train.toml", folder / "files")
    return folder / "files"


def read_sharded(folder: Path) -> dict[str, Any]:
    config = read_tree(TrainConfig, folder / "train.toml").model
    config = dataclasses.replace(config, vocab_size=300)
    path = folder / "step-00000002.shards"
    return {"progress": read_progress(path).tokens, "model": whole_model(config, path).state_dict()}


def adapters_of(folder: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    layer = "base_model.model.layers.0.q_proj.lora_"
    folder.mkdir()
    shapes = {"A": (2, 8), "B": (6, 2)}
    tensors = {
        f"{layer}{part}.weight": torch.randn(shape, generator=generator)
        for part, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4 + seed, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    write_digests(folder, ["adapter_config.json", "adapter_model.safetensors"])
    return folder


def read_adapters(folder: Path) -> list[Any]:
    found = AdapterFolder(folder)
    return [(name, *pair, found.scale(name)) for name, pair in found.tensors().items()]


def placement_of(folder: Path, seed: int) -> Path:
    loads = np.random.default_rng(seed).zipf(1.5, (3, 8)).clip(max=50)
    devices = Devices(num_nodes=1, gpus_per_node=2)
    placement = EPLB()(RoutingProfile.from_loads(loads), devices, num_replicas=2)
    found = PlacementMap(
        signature=SIGNATURE, devices=devices, placement=placement, algorithm="eplb"
    )
    folder.mkdir()
    found.save(folder / "map.json")
    return folder


def read_placement(folder: Path) -> dict[str, Any]:
    return dataclasses.asdict(load_placement_map(folder / "map.json"))


SHAPE = Shape(num_layers=3, num_experts=8, top_k=2)


def predictor_of(folder: Path, seed: int) -> Path:
    routes = make_routes(SHAPE, num_sequences=4, length=20, seed=seed)
    estimator = make_estimator("popularity", SHAPE)
    estimator.fit(routes)
    folder.mkdir()
    write_predictor(folder / "predictor.npz", estimator, SIGNATURE)
    return folder


def learned_of(folder: Path, seed: int) -> Path:
    folder.mkdir()
    learner = ActivationMatrices(SHAPE)
    counts = np.random.default_rng(seed).integers(0, 9, (2, 3, 8)).astype(np.float32)
    learner.restore({"matrices": counts})
    keep_learned(learner, SIGNATURE, folder / "learned.npz")
    return folder


def read_learned(folder: Path) -> Any:
    learner = ActivationMatrices(SHAPE)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", MoERuntimeWarning)
        restore_learned(learner, SIGNATURE, folder / "learned.npz")
    for warning in told:
        assert "begins anew" in str(warning.message)
        raise CheckpointError(str(warning.message))
    return learner.learned()


def test_a_tensor_that_is_marked_as_a_folder_is_refused(tmp_path: Path) -> None:
    """One bit of the archive's directory, for which torch leaves the tensor's memory as it was."""
    path = tmp_path / "step-00000001.pt"
    write_content(path, {"weights": torch.arange(4.0)})
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        number = next(n for n, name in enumerate(archive.namelist()) if name.endswith("data/0"))
    entry = -1
    for _ in range(number + 1):
        entry = content.index(b"PK\1\2", entry + 1)
    content[entry + 38] |= 0x10
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"data/0 is not what was written"):
        load_content(path, RunProgress)


def damaged(content: bytes, other: bytes, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Damages of a file."""
    # anywhere, and near the end, where an archive has its directory
    for most in (len(content), min(300, len(content))):
        flipped = bytearray(content)
        flipped[-1 - chance.randrange(most)] ^= 1 << chance.randrange(8)
        yield "a flipped bit", bytes(flipped)
    yield "cut short", content[: chance.randrange(len(content))]
    yield "empty", b""
    yield "of another run", other
    yield "of another kind", b"[1, 2]\n"


def assert_each_file_is_right_or_named(
    stored: Stored, other: Stored, names: list[str], scratch: Path, *, stands_alone: bool = False
) -> None:
    """A file that stands alone may be another run's: people name it."""
    chance = random.Random(7)
    for name in names:
        content = (stored.folder / name).read_bytes()
        twin = (other.folder / name).read_bytes()
        for fault, changed in damaged(content, twin, chance):
            is_good = stands_alone and fault == "of another run"
            right = other.right if is_good else stored.right
            line = stored.outcome(scratch, name, changed, right)
            if fault == "of another run" and content != twin:
                assert bool(line) != stands_alone, f"{name} of another run was accepted"


def files_of(folder: Path, other: Path) -> list[str]:
    """Names of the files that two folders have, below them."""
    found = ({str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (folder, other))
    return sorted(set.intersection(*found))


@pytest.mark.parametrize("name", ["memory", "offloaded"])
def test_each_file_of_a_run(
    name: str,
    runs: dict[str, tuple[Stored, Stored]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored, other = runs[name]
    kinds = ["out/checkpoints/", "out/experts/"]
    if name == "memory":
        kinds = ["out/checkpoints/", "out/metrics.jsonl", "out/tokenizer/tokenizer.json"]
        kinds += ["out/tokenizer/digests.json", "out/data/tales-training", "out/data/rules-held"]
    names = [n for n in files_of(stored.folder, other.folder) if n.startswith(tuple(kinds))]
    assert len(names) == len(kinds)
    # the text is encoded anew where its cache is damaged: with a warning that names the file
    monkeypatch.setattr("moe_runtime.training.data.warnings.warn", lambda *_, **__: None)
    assert_each_file_is_right_or_named(stored, other, names, tmp_path)


MAKERS = {
    "sharded": (sharded_of, read_sharded),
    "adapters": (adapters_of, read_adapters),
    "placement": (placement_of, read_placement),
    "predictor": (
        predictor_of,
        lambda folder: read_predictor(folder / "predictor.npz", SIGNATURE).state(),
    ),
    "learned": (learned_of, read_learned),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_each_file_that_is_kept(kind: str, tmp_path: Path) -> None:
    make, read = MAKERS[kind]
    one, other = (Stored(make(tmp_path / f"{kind}-{seed}", seed), read) for seed in (0, 1))
    names = [n for n in files_of(one.folder, other.folder) if not n.endswith(".toml")]
    alone = kind in ("placement", "predictor", "learned")
    assert_each_file_is_right_or_named(one, other, names, tmp_path, stands_alone=alone)


WRONG = (-1, -0.5, float("nan"), None, True, "x", [], {}, (1, "x"), {"x": 1}, torch.ones(3))
"""Wrong values for each place in a checkpoint, in turn."""


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places of values in a checkpoint; of many similar ones only the first."""
    yield path
    if isinstance(value, dict):
        kinds = {re.sub(r"\d+", "", str(name)) for name in value}
        are_alike = len(value) > 11 or len(kinds) == 1
        for name in list(value)[: 1 if are_alike else None]:
            yield from places_in(value[name], (*path, name))
    elif isinstance(value, list | tuple) and value:
        yield from places_in(value[0], (*path, 0))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of nested values with another one in a place; without it where it is `put` itself."""
    if not path:
        return new
    first, *rest = path
    if isinstance(value, dict):
        changed = put(value.get(first), tuple(rest), new)
        kept = {n: v for n, v in value.items() if n != first}
        return kept if changed is put else {**kept, first: changed}
    items = list(value)
    items[first] = put(items[first], tuple(rest), new)
    return type(value)(item for item in items if item is not put)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["memory", "offloaded"])
def test_each_value_of_a_checkpoint(name: str, every: int, runs: Runs, tmp_path: Path) -> None:
    """Files that are whole, and hold other values than a run writes; every third of these."""
    stored, _ = runs[name]
    file = "out/checkpoints/step-00000002.pt"
    content = torch.load(stored.folder / file, weights_only=True)
    assert stored.outcome(tmp_path, file, (stored.folder / file).read_bytes(), stored.right) == ""
    chance = random.Random(3)
    cases: list[tuple[tuple[Any, ...], Any]] = [((), 0), ((), [])]
    places = [*places_in(content)][1:]
    for place in places:
        # another value, and a name that is missing
        cases += [(place, chance.choice(WRONG)), (place, put)]
    # names that a run does not write
    tables = sorted({place[:-1] for place in places if isinstance(place[-1], str)}, key=str)
    cases += [((*table, "unknown"), 1) for table in tables]
    if name == "offloaded":  # the other values are those of a run in memory
        cases = [case for case in cases if case[0][:1] == ("optimizer",)]
    refused, cases = 0, cases[::every]
    for place, value in cases:
        changed = put(content, place, value)
        if place[:2] == ("optimizer", "dense") or (place[-1:] == (0,) and value is put):
            continue  # as those of a run in memory; parameters may have had no gradient
        written = io.BytesIO()
        torch.save(changed, written)
        refused += bool(stored.outcome(tmp_path, file, written.getvalue(), stored.right))
    assert refused > len(cases) / 2


def test_metrics_of_an_older_version_are_told_by_their_steps(runs: Runs, tmp_path: Path) -> None:
    """Their checkpoints have no digest of them; odd lines are refused by number."""
    stored, _ = runs["memory"]
    copy = tmp_path / "run"
    shutil.copytree(stored.folder, copy)
    file, metrics = copy / "out/checkpoints/step-00000002.pt", copy / "out/metrics.jsonl"
    content = torch.load(file, weights_only=True)
    torch.save(put(content, ("records",), put), file)
    lines = metrics.read_bytes()
    metrics.write_bytes(lines + b'{"step": 3}\n')
    assert Stored(copy, resumed).right == stored.right
    for odd in (b"\xff", b"[]", b"{}", b'{"step": -1}', b'{"step": 1, "loss": "x"}', b"{" * 9999):
        metrics.write_bytes(lines + odd + b"\n")
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl: line 3"):
            resumed(copy)


def test_one_run_at_a_time_uses_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, config=SMALL)
    one_step = ("--set", "run.steps=1")
    out = tmp_path / "out"
    out.mkdir()
    with locked(out / "run.lock"):
        for words in (one_step, (*one_step, "--resume")):
            assert "another train or finetune uses this folder" in error_of(capsys, path, *words)
        assert train(path, *one_step, "--dry-run") == 0
    # Experts of a run with another folder of its own.
    elsewhere = ("--set", "run.host_memory=1GiB", "--set", f"run.storage_dir='{out}'")
    with locked(out / "run.lock"):
        words = (*one_step, *elsewhere, "--set", "run.output=other")
        assert f"{out}: another train or finetune uses" in error_of(capsys, path, *words)
    assert not (tmp_path / "other").exists()
    assert [entry.name for entry in out.iterdir()] == []
    with run_folder(out, out / "../out", is_used=True):
        pass
    # What a process that died left there holds nothing.
    (out / "run.lock").touch()
    assert train(path, *one_step) == 0
    assert "run.lock" not in {entry.name for entry in out.iterdir()}
