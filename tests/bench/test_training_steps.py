"""`bench training`: losses agree with transformers'; who trains otherwise is out."""

import json
import runpy
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counted_energy import CountedEnergy
from text_checkpoint import NUM_EXPERTS, TOP_K, save_text_checkpoint

from moe_runtime.benchmarks.cases import training
from moe_runtime.benchmarks.cases.training import (
    FusedAdamW,
    OffloadedSystem,
    TrainingPeer,
    TrainingPlan,
    in_transformers,
    ours_in_memory,
)
from moe_runtime.benchmarks.commands import layers
from moe_runtime.benchmarks.peers import deepspeed
from moe_runtime.benchmarks.suite import PeerFailedError, read_results
from moe_runtime.benchmarks.suite.peers import find_peer
from moe_runtime.benchmarks.synthetic.model_shapes import LayerSizes
from moe_runtime.cli.main import main
from moe_runtime.models.lm.export import export_hugging_face
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.training.offload.disk import Disk

SIZES = LayerSizes(num_experts=4, top_k=2, dim_model=32, dim_hidden=16)
PLAN = TrainingPlan(sizes=SIZES, layers=1, sequences=2, context=16, dtype=torch.float32)
REMEMBERING = """
INSTALL = "pip install nothing"
PACKAGES = ()
CASES = ("training",)
VARIANTS = ("other", "dies", "silent")

class Peer:
    def __init__(self, settings):
        assert (settings["rate"], settings["betas"], settings["decay"]) == (3e-4, [0.9, 0.95], 0.1)
        self.settings = settings
    def load(self):
        self.steps = iter(self.settings["steps"])
    def train(self, windows):
        if self.settings["variant"] == "dies":
            raise ValueError("no room")
        expected, loss = next(self.steps)
        assert windows == expected
        if self.settings["variant"] == "silent":
            return None
        return loss + 2e-4 * (self.settings["variant"] == "other")
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_who_takes_other_steps_has_no_numbers(dtype, tmp_path):
    plan = TrainingPlan(sizes=SIZES, layers=1, sequences=2, context=16, dtype=dtype)
    reference = ours_in_memory(plan, [])
    expected = [reference.step() for _ in range(3)]
    assert len(set(expected)) == 3
    torch.manual_seed(0)
    export_hugging_face(LanguageModel(plan.config()), tmp_path / "model")
    sound = in_transformers("eager", plan, tmp_path / "model", expected)
    assert sound.repeat()["step_s"] > 0
    assert sound.equal == sound.compared == 3
    wrong = in_transformers("eager", plan, tmp_path / "model", expected)
    assert isinstance(wrong._optimizer, FusedAdamW)
    # A rate that is a hundred times as large: the first loss agrees, those after it do not.
    for group in wrong._optimizer._adamw.param_groups:
        group["lr"] *= 100
    with pytest.raises(PeerFailedError, match=r"a loss differs by .* in step [23]: \S+ instead"):
        wrong.repeat()
    assert 1 <= wrong.equal < 3


def test_a_peer_is_given_the_same_tokens_and_held_to_the_same_losses(tmp_path):
    reference = ours_in_memory(PLAN, [])
    expected = [reference.step() for _ in range(3)]
    steps = [(PLAN.windows(number).tolist(), loss) for number, loss in enumerate([*expected, 0.0])]
    file = tmp_path / "remembering.py"
    file.write_text(REMEMBERING)
    with ExitStack() as running:

        def peer(variant: str) -> TrainingPeer:
            settings = {"num_threads": 1, "steps": steps}
            program = find_peer(f"{file}{variant}", settings, "training")
            return TrainingPeer(program, PLAN, expected, running)

        sound, other, dies, silent = map(peer, ("", ":other", ":dies", ":silent"))
        assert sound.repeat()["step_s"] > 0
        assert (sound.compared, sound.equal) == (3, 3)
        assert sound.versions.keys() == {"python"}
        with pytest.raises(PeerFailedError, match=r"a loss differs by 0\.0002"):
            other.repeat()
        with pytest.raises(PeerFailedError, match="ValueError: no room"):
            dies.repeat()
        with pytest.raises(PeerFailedError, match="must be a string or a real number"):
            silent.repeat()


def test_joules_are_those_of_a_step_that_is_timed(tmp_path, monkeypatch):
    """Of this project, in this process, and of a peer, in its own; not of the steps before."""
    windows = PLAN.windows
    taken = list[int]()

    def counted(step: int) -> torch.Tensor:
        taken.append(step)
        return windows(step)

    monkeypatch.setattr(TrainingPlan, "windows", lambda plan, step: counted(step))
    meter = CountedEnergy(lambda: 2.5 * len(taken))
    monkeypatch.setattr(training, "EnergyMeter", lambda: meter)
    reference = ours_in_memory(PLAN, [])
    expected = [reference.step() for _ in range(3)]
    ours = ours_in_memory(PLAN, expected)
    assert [ours.repeat()["cpu_joules"] for _ in range(2)] == [2.5, 2.5]
    (tmp_path / "remembering.py").write_text(REMEMBERING)
    steps = [(windows(number).tolist(), loss) for number, loss in enumerate([*expected, 0.0])]
    program = find_peer(
        str(tmp_path / "remembering.py"), {"num_threads": 1, "steps": steps}, "training"
    )
    with ExitStack() as running:
        found = TrainingPeer(program, PLAN, expected, running).repeat()
    assert found["cpu_joules"] == 2.5


class Engine:
    """Stands in for DeepSpeed's: the optimizer steps by the gradients as they are."""

    def __init__(self, model: Any, optimizer: Any, config: dict[str, Any]) -> None:
        self.module, self.optimizer, self.config = model, optimizer, config

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.module(*given, **options)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("variant", [None, "nvme"])
def test_deepspeed_takes_the_steps_that_are_asked_for(variant, tmp_path, monkeypatch):
    """With torch's AdamW in place of its own; decay is each group's, as there."""

    def adam(groups: Any, **options: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(groups, weight_decay=0.0, **options)

    stand_in = SimpleNamespace(initialize=lambda **given: (Engine(**given), None, None, None))
    monkeypatch.setitem(sys.modules, "deepspeed", stand_in)
    monkeypatch.setitem(sys.modules, "deepspeed.ops", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", SimpleNamespace(DeepSpeedCPUAdam=adam))
    for name in ("DS_ACCELERATOR", "LOCAL_RANK", "PATH"):
        monkeypatch.setenv(name, "")
    torch.manual_seed(0)
    export_hugging_face(LanguageModel(PLAN.config()), tmp_path / "model")
    settings = {"model": str(tmp_path / "model"), "dtype": "float32"}
    settings |= {"num_threads": torch.get_num_threads(), "sequences": 2}
    settings |= {"rate": 3e-4, "betas": [0.9, 0.95], "decay": 0.1, "variant": variant}
    peer = deepspeed.Peer(settings)
    try:
        peer.load()
        reference = ours_in_memory(PLAN, [])
        for number in range(4):
            loss = peer.train(PLAN.windows(number).tolist())
            assert loss == pytest.approx(reference.step(), abs=2e-5)
    finally:
        torch.distributed.destroy_process_group()
    config = peer._engine.config
    place = (
        {"device": "nvme", "nvme_path": str(tmp_path / "model")} if variant else {"device": "cpu"}
    )
    assert config["zero_optimization"]["offload_optimizer"] == place
    assert config["zero_optimization"]["stage"] == (3 if variant else 2)
    assert (config["gradient_clipping"], config["bf16"]["enabled"]) == (0.0, False)


@pytest.mark.long
def test_what_compares_no_digests_trains_the_same(tmp_path, monkeypatch):
    sizes = LayerSizes(num_experts=8, top_k=4, dim_model=64, dim_hidden=512)
    plan = TrainingPlan(sizes=sizes, layers=1, sequences=1, context=16, dtype=torch.float32)
    reference, compare = ours_in_memory(plan, []), Disk._compare
    expected = [reference.step() for _ in range(3)]
    compared = list[Any]()
    file = Path(training.__file__).parents[1] / "ablations" / "record_digests.py"
    for variant in (None, "unchecked"):
        monkeypatch.setattr(
            Disk, "_compare", lambda disk, part: (compared.append(part.key), compare(disk, part))
        )
        folder = tmp_path / str(variant)
        torch.manual_seed(0)
        export_hugging_face(LanguageModel(plan.config()), folder)
        settings = {"model": str(folder), "num_threads": 1, "host_memory": 14 << 20}
        settings |= {"rate": 3e-4, "betas": [0.9, 0.95], "decay": 0.1, "variant": variant}
        peer = runpy.run_path(str(file))["Peer"](settings)
        peer.load()
        losses = [peer.train(plan.windows(number).tolist()) for number in range(3)]
        peer.close()
        assert losses == pytest.approx(expected, abs=2e-5)
        assert bool(compared) == (variant is None)
        compared.clear()


def test_the_command_trains_in_memory_and_offloaded(tmp_path, capsys):
    save_text_checkpoint(tmp_path / "model")
    path = tmp_path / "r.json"
    words = ["--layers", "1", "--sequences", "1", "--context", "8", "--host-memory", "64MiB"]
    words += ["--quick", "--time", "1", "--threads", "1", "--precision", "1"]
    words += ["-o", str(path), "--json", "--peer", str(tmp_path / "eager.py")]
    (tmp_path / "eager.py").write_text(REMEMBERING)
    # The peer that was named has no numbers, and the others' are written.
    assert main(["bench", "training", str(tmp_path / "model"), *words]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    names = [one["system"] for one in printed["measurements"]]
    assert names == ["moe_runtime", "grouped_mm", "eager", "moe_runtime:offloaded", "eager#2"]
    *systems, failed = printed["measurements"]
    assert failed["failure"]
    for one in systems:
        assert one["quality"] == {"compared": 3, "equal": 3}
        assert list(one["summary"])[:2] == ["step_s", "tokens_per_s"]
    (repetition,) = {tuple(one) for one in systems[-1]["repetitions"]}
    assert repetition[2:5] == ("storage_read_bytes", "storage_written_bytes", "stall_s")
    found = printed["settings"]
    sizes = [found[name] for name in ("num_experts", "top_k", "dim_model", "dim_hidden")]
    assert sizes == [NUM_EXPERTS, TOP_K, 64, 48]


@pytest.mark.long
def test_what_a_step_moves_is_counted_and_moved_again(tmp_path):
    """Records are 3 x 64 x 512 numbers of 12 bytes, of which 16 MiB have room for a few of 16."""
    sizes = LayerSizes(num_experts=16, top_k=4, dim_model=64, dim_hidden=512)
    plan = TrainingPlan(sizes=sizes, layers=1, sequences=1, context=32, dtype=torch.float32)
    reference = ours_in_memory(plan, [])
    expected = [reference.step() for _ in range(3)]
    system = OffloadedSystem(replace(plan, host_memory=16 << 20), tmp_path, expected)
    found = dict(system.repeat())
    system.training.close()
    assert (system.compared, system.equal) == (3, 3)
    record = 12 * 3 * sizes.dim_model * sizes.dim_hidden
    # What lies in slots from the step before is not read again.
    assert 4 * record < found["storage_read_bytes"] <= 2 * 16 * record
    assert 4 * record < found["storage_written_bytes"] <= 2 * 16 * record
    assert (tmp_path / "as-large").stat().st_size >= 16 * record


def test_bytes_alone_are_those_that_are_asked_for(tmp_path, monkeypatch):
    file, block = tmp_path / "file", 4 << 20
    file.write_bytes(bytes(2 * block))
    calls = list[tuple[str, int]]()
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(
            training.os,
            name,
            lambda _, buffers, offset, name=name: calls.append((name, len(buffers[0]) + offset)),
        )
    if training.seconds_alone(file, 3 * block, 2 * block) is not None:  # else no direct I/O here
        assert sorted(name for name, _ in calls) == ["preadv"] * 3 + ["pwritev"] * 2
        assert {end for _, end in calls} == {block, 2 * block}
    assert training.seconds_alone(file, block - 1, 0) is None


def test_an_older_processor_is_asked_for_in_a_new_process(monkeypatch):
    """Once torch's libraries are held to it, only ours is."""
    started, selected = list[dict[str, str]](), list[str]()

    def begin(program: str, words: list[str], environment: dict[str, str]) -> None:
        assert [program, *sys.orig_argv[1:]] == words
        started.append(environment)

    library = SimpleNamespace(select_isa=selected.append)
    monkeypatch.setattr("moe_runtime.kernels.native.require_native", lambda: library)
    monkeypatch.setattr(layers.os, "execve", begin)
    for name in layers.OLDER["avx2"]:
        monkeypatch.delenv(name, raising=False)
    layers.hold_to(None)
    assert not started
    layers.hold_to("avx2")
    assert started[0].items() >= layers.OLDER["avx2"].items()
    for name, value in layers.OLDER["avx2"].items():
        monkeypatch.setenv(name, value)
    layers.hold_to("avx2")
    assert (len(started), selected[-1]) == (1, "avx2")
