"""Outputs of runs: no partial files, and old traces until new ones are complete."""

import contextlib
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_runs import MIXTRAL, checkpoint_of, write_text
from torch import nn
from training_runs import error_of, train, training_records, write_run

from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError, MoERuntimeWarning, RankFailureError
from moe_runtime.files import OutputFile
from moe_runtime.models.pocket import pocket_path
from moe_runtime.training.checkpoint import BackgroundSave, checkpoints_in, remove_oldest
from moe_runtime.training.data import load_tokenizer
from moe_runtime.training.finetune.checkpoint_model import write_adapters
from moe_runtime.training.finetune.settings import LoraConfig
from moe_runtime.training.prepared import check_inputs_stay, check_outputs, run_folder

FEW = ("--set", "run.steps=1", "--set", "run.checkpoint_every=1")
MORE = ("--set", "run.steps=2", "--set", "run.checkpoint_every=1", "--resume", "--reschedule")


def partials(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.partial"))


def test_what_killed_runs_left_goes_with_the_next_run(tmp_path):
    path = write_run(tmp_path)
    output = tmp_path / "out"
    assert train(path, *FEW) == 0
    for name in ("step-00000007.pt.4711.partial", "step-00000007.pt.0123abcd.partial"):
        (output / "checkpoints" / name).write_bytes(b"half")
    (output / "checkpoints" / "step-00000007.shards.partial").mkdir()
    (output / "data" / "text-training-0011.npy.89abcdef.partial").write_bytes(b"half")
    (output / "model.89abcdef.partial").mkdir()
    (output / "data" / "somebody's.partial").write_bytes(b"stays")
    living = OutputFile(output / "checkpoints" / "step-00000009.pt")
    held = [os.path.basename(name) for name in partials(output) if "step-00000009" in name]
    assert train(path, *MORE) == 0
    assert partials(output) == sorted([*held, "somebody's.partial"])
    living.discard()


def test_a_refused_run_leaves_the_trace(tmp_path):
    path = write_run(tmp_path)
    trace = tmp_path / "trace.npz"
    assert train(path, *FEW) == 0
    trace.write_bytes(b"old")
    words = ("--set", "run.trace='trace.npz'")
    assert train(path, *FEW, *words) == 2
    assert train(path, *MORE, *words, "--set", "run.host_memory='1KiB'") == 2
    assert trace.read_bytes() == b"old"


def test_a_name_of_no_file_is_no_trace(tmp_path, capsys):
    """As on the command line of other runs: a path alone has lost the slash at its end."""
    path = write_run(tmp_path)
    for setting, complaint in (
        ("run.trace='folder/'", "run.trace folder/: is a folder, expected the name of a file"),
        ("run.trace='-'", "run.trace -: expected the name of a file"),
        ("run.output=''", "run.output must be a path, got ''"),
    ):
        assert train(path, *FEW, "--set", setting) == 2
        assert complaint in capsys.readouterr().err
    assert set(os.listdir(tmp_path)) == {path.name, "texts"}


def test_a_full_disk_is_known_before_the_text_is_read(tmp_path, capsys, monkeypatch):
    path = write_run(tmp_path)
    (tmp_path / "out").mkdir()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moe_runtime.files.new_held", full)
    monkeypatch.setattr("moe_runtime.training.train_run.read_corpora", None)
    assert train(path, *FEW) == 2
    assert "the run's output cannot be written: No space left" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_a_run_that_never_begins_leaves_nothing_in_a_new_folder(
    tmp_path, capsys, monkeypatch, command
):
    path, folder = write_run(tmp_path), tmp_path / "new" / "out"
    words = [str(path), *FEW, "--set", f"run.output={folder}", "--set", "run.host_memory=1GiB"]
    if command == "finetune":
        model = str(checkpoint_of(MIXTRAL, tmp_path / "model"))
        words = [model, str(write_text(tmp_path)), "-o", str(folder), "--context", "16"]
        words += ["--sequences", "2", "--steps", "1", "--host-memory", "1GiB"]
    before = sorted(tmp_path.rglob("*"))
    made: list[str] = []

    def full(*_: object, **__: object) -> None:
        made.extend(os.listdir(folder))
        raise OSError(28, "No space left on device")

    # The first when all is prepared, the second in the step.
    for place in ("training.loop.Trainer.__init__", "training.loop.Trainer.train"):
        with monkeypatch.context() as patch:
            patch.setattr(f"moe_runtime.{place}", full)
            assert main([command, *words]) == 2
        assert "No space left" in capsys.readouterr().err
        assert {"data", "metrics.jsonl"} <= set(made)
        assert sorted(tmp_path.rglob("*")) == before
    folder.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr("moe_runtime.training.loop.Trainer.train", full)
        assert main([command, *words]) == 2
    assert (folder / "data").is_dir()  # somebody's folder is left alone
    assert main([command, *words]) == 0


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As `ulimit -f`: writing more than that is an error, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_gets_too_large_is_one_line_with_its_name(tmp_path, capsys):
    model, output = checkpoint_of(MIXTRAL, tmp_path / "model"), tmp_path / "out"
    words = ["finetune", str(model), str(write_text(tmp_path)), "-o", str(output), "--steps", "1"]
    words += ["--context", "16", "--sequences", "2", "--host-memory", "1GiB"]
    words += ["--lora", "2", "--merge"]
    assert main(words) == 0
    checkpoint, exported = output / "checkpoints" / "step-00000001.pt", output / "model"
    sizes = [path.stat().st_size for path in (checkpoint, *exported.glob("*.safetensors"))]
    assert sizes[0] < sizes[1]
    shutil.rmtree(output)
    capsys.readouterr()

    with files_of_at_most(sizes[0] - 1):
        assert main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"moe-runtime: error: {checkpoint}: File too large"
    assert {"data", "metrics.jsonl"} <= set(os.listdir(output))  # of a run that took a step

    with files_of_at_most(sizes[0]):
        assert main(words) == 2
    *_, kept, last = capsys.readouterr().err.splitlines()
    assert f"{checkpoint}: is kept; free space, and the same command with --resume" in kept
    assert last.startswith(f"moe-runtime: error: {exported}")
    assert last.endswith(": File too large")
    assert not exported.exists()
    assert partials(output) == []
    assert main([*words, "--resume"]) == 0
    assert exported.is_dir()


def test_a_save_that_fails_is_noticed_before_the_next(tmp_path, capsys, monkeypatch):
    """Records of the steps so far stay."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def start_and_wait(self: BackgroundSave, job: Callable[[], object]) -> None:
        start(self, job)
        self._thread.submit(int).result()  # behind the job

    start = BackgroundSave.start
    monkeypatch.setattr("moe_runtime.training.loop.save_checkpoint", full)
    monkeypatch.setattr(BackgroundSave, "start", start_and_wait)
    path, steps = write_run(tmp_path), ("run.steps=6", "run.checkpoint_every=2")
    assert train(path, *(word for step in steps for word in ("--set", step))) == 2
    assert "free space, and give the same command again" in capsys.readouterr().err
    assert [record["step"] for record in training_records(tmp_path / "out")] == [1, 2]


def test_what_a_run_wrote_stays_when_another_process_ends(tmp_path):
    output = tmp_path / "new" / "out"
    ended = RankFailureError("rank 1 of 2 has ended", ranks=(1,))
    with contextlib.suppress(RankFailureError), run_folder(output, is_used=True):
        for name in ("data", "experts"):
            (output / name).mkdir()
        (output / "metrics.jsonl").write_text("{}\n")
        raise ended
    left = set(os.listdir(output))
    assert {"data", "metrics.jsonl"} <= left
    assert "experts" not in left


def test_adapters_that_cannot_be_written_are_named(tmp_path):
    adapted = nn.Module()
    adapted.register_parameter("lora_A", nn.Parameter(torch.zeros(4096)))
    model: Any = nn.Sequential(adapted)
    lora = LoraConfig(rank=1, places=("attention",))
    write_adapters(tmp_path / "first", model, [], lora, "base")
    with files_of_at_most(4096), pytest.raises(OSError, match="adapters cannot be") as error:
        write_adapters(tmp_path / "second", model, [], lora, "base")
    assert str(tmp_path / "second") in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_who_lacks_the_text_of_a_run_learns_how_it_is_made(tmp_path, capsys):
    """The pocket model's: the message leads to the head of the file, which has the command."""
    path = tmp_path / "train.toml"
    path.write_text((pocket_path() / "train.toml").read_text())
    assert main(["train", str(path), "--dry-run"]) == 2
    assert "a configuration file may say how at its head" in capsys.readouterr().err
    head = path.read_text().partition("\n\n")[0]
    assert "moe_runtime.models.pocket.texts --output models/pocket/texts" in head


def test_a_run_s_places_are_known_before_its_work(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    out = tmp_path / "out"
    check_outputs(out, out / "trace.npz")  # the run makes the folder first
    for output, trace, reason in (
        (out, out / "missing" / "x.npz", "there is no folder"),
        (out, out, "is the run's folder"),
        (out / "run", out, "is the run's folder"),
        (tmp_path / "file", None, "is not a folder"),
        (tmp_path / "loop", None, "is not a folder"),
        (out, tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / "file" / "below", None, "is not a folder"),
    ):
        check_inputs_stay(output, trace, [tmp_path / "text.txt"], tmp_path / "model")
        with pytest.raises(CheckpointError, match=reason):
            check_outputs(output, trace)
    (out / "checkpoints").mkdir(parents=True)
    check_outputs(out, out / "checkpoints" / "x.npz")
    (out / "data").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is not a folder"):
        check_outputs(out, None)


def test_a_run_does_not_write_beside_its_gguf_file(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"")
    check_inputs_stay(tmp_path / "out", None, [], model)
    with pytest.raises(ValueError, match="would lie among those of"):
        check_inputs_stay(tmp_path, None, [], model)
    with pytest.raises(ValueError, match=r"model\.gguf"):
        check_inputs_stay(tmp_path / "out", model, [], model)
    other = model.rename(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="is not a tokenizer's folder"):
        load_tokenizer(other)


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    for number in (1, 2):
        (tmp_path / f"step-0000000{number}.pt").write_bytes(b"")

    def unlink(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.warns(MoERuntimeWarning, match="there are newer checkpoints"):
            remove_oldest(tmp_path, 1)
    assert len(checkpoints_in(tmp_path)) == 2
    remove_oldest(tmp_path, 1)
    assert [found.name for found in checkpoints_in(tmp_path)] == ["step-00000002.pt"]


@pytest.mark.parametrize(
    "setting",
    ["run.output='texts'", "run.trace='texts/rules.txt'", "run.trace='train.toml'"],
    ids=["folder", "text", "configuration"],
)
def test_outputs_among_the_text_are_refused(tmp_path, capsys, setting):
    path = write_run(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert "would" in error_of(capsys, path, "--set", setting)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
