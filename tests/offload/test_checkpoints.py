"""Checkpoints after kills, power cuts, full and damaged disks, and with other budgets."""

import contextlib
import errno
import multiprocessing
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded_models import batches, offloaded, rate_of, save, stack

import moe_runtime
from moe_runtime.errors import CapacityError, CheckpointError, MoERuntimeError
from moe_runtime.training.offload import OffloadedTraining, disk
from moe_runtime.training.offload.disk import RecordFile

SETTINGS = moe_runtime.AdamW(weight_decay=0.1)
STEPS = 6


def begin(folder: Path, share: float) -> tuple[OffloadedTraining, Any, list[float]]:
    """A run at its last checkpoint, or at its beginning."""
    model, file = stack(), folder / "checkpoint.pt"
    if not file.exists():
        return offloaded(model, SETTINGS, folder, experts_in_memory=share), model, []
    state = torch.load(file, weights_only=True)
    training = offloaded(
        model, SETTINGS, folder, experts_in_memory=share, resume=state["optimizer"]
    )
    model.load_state_dict(state["model"])
    return training, model, state["losses"]


def run(folder: Path, share: float, *, until: int = STEPS) -> list[float]:
    """Trains on to a step with a checkpoint after every one; returns all losses so far."""
    training, model, losses = begin(folder, share)
    inputs = batches(STEPS)
    while len(losses) < until:
        step = len(losses)
        (loss,) = training.backward([partial(model.loss, inputs[step])], rate=rate_of(step))
        training.step(rate_of(step))
        losses.append(float(loss))
        save(training, folder / "checkpoint.pt", losses)
        training.check()
    training.close()
    return losses


def fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an undisturbed run; they do not depend on the experts' tiers."""
    return run(tmp_path_factory.mktemp("whole"), 0.4)


def test_resumes_under_another_budget(tmp_path, expected):
    folder = fresh(tmp_path / "parts")
    for until, share in ((1, 0.0), (3, 1.0), (5, 0.5), (STEPS, 0.0)):
        losses = run(folder, share, until=until)
    assert losses == expected


def test_killed_at_any_instant(tmp_path, expected):
    folder = fresh(tmp_path / "killed")
    fork = multiprocessing.get_context("fork")
    dice = random.Random(1)
    for share in (0.4, 0.0, 1.0, 0.4, 0.7):
        child = fork.Process(target=run, args=(folder, share))
        child.start()
        assert child.pid is not None
        time.sleep(dice.uniform(0.0, 0.4))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert run(folder, 0.4) == expected


class Unsynced(RecordFile):
    """A disk that loses unflushed writes in a power cut."""

    def write(self, offset: int, content: memoryview) -> int:
        if not hasattr(self, "before"):
            self.before: list[tuple[int, bytes]] = []
        old = bytearray(len(content))
        os.preadv(self._fd, [old], offset)
        self.before.append((offset, bytes(old)))
        return super().write(offset, content)

    def sync(self) -> None:
        super().sync()
        self.before = []

    def lose_power(self) -> None:
        for offset, old in reversed(getattr(self, "before", [])):
            super().write(offset, memoryview(old))


def test_power_cut_loses_nothing_that_a_checkpoint_names(tmp_path, monkeypatch, expected):
    folder, files = fresh(tmp_path / "cut"), []

    def open_file(path: Path, size: int, slots: int) -> Unsynced:
        files.append(Unsynced(path, size, slots, direct=False))
        return files[-1]

    monkeypatch.setattr(disk, "RecordFile", lambda *place, direct: open_file(*place))
    for until in (1, 4):
        training, model, losses = begin(folder, 0.3)
        inputs = batches(STEPS)
        while len(losses) < until:
            step = len(losses)
            (loss,) = training.backward([partial(model.loss, inputs[step])], rate=rate_of(step))
            training.step(rate_of(step))
            losses.append(float(loss))
            save(training, folder / "checkpoint.pt", losses)
        training.wait()
        # two more steps that no checkpoint sees
        for step in (until, until + 1):
            training.backward([partial(model.loss, inputs[step])], rate=rate_of(step))
            training.step(rate_of(step))
        training.optimizer.records.wait_for_transfers()
        for file in files:
            file.lose_power()
        training.close()
        files.clear()
    monkeypatch.undo()
    assert run(folder, 0.3) == expected


def test_damaged_record_is_named(tmp_path):
    run(tmp_path, 0.3, until=3)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    slot = state["optimizer"]["experts"]["experts"]["layers.1.experts.4"][0]
    (file,) = tmp_path.glob("experts-*.records")
    size = int(file.stem.split("-")[1])
    with file.open("r+b") as opened:
        opened.seek(slot * size + 100)
        opened.write(b"\x55\xaa")
    with pytest.raises(CheckpointError, match="expert 4 of MoE layer 1 is damaged"):
        begin(tmp_path, 0.3)
    with file.open("r+b") as opened:
        opened.truncate(size)
    with pytest.raises(MoERuntimeError):
        begin(tmp_path, 0.3)


@pytest.mark.parametrize("kind", ["experts", "gradients"])
def test_a_byte_that_changes_on_the_disk_ends_the_step(tmp_path, kind):
    """Every read within a run is compared with the digest of the write."""
    settings = moe_runtime.AdamW(clip_norm=1.0)  # gradients wait on the disk for the norm
    training = offloaded(model := stack(), settings, tmp_path, experts_in_memory=0.0)
    first, second = (partial(model.loss, x) for x in batches(2, tokens=100))
    training.backward([first])
    training.step()
    training.backward([second], is_last=False)
    training.optimizer.records.wait_for_transfers()
    (file,) = tmp_path.glob(f"{kind}-*")
    content = bytearray(file.read_bytes())
    size = int(file.stem.split("-")[1])
    for slot in range(0, len(content), size):
        content[slot + 5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file}: expert \d of MoE layer \d is damaged"):
        training.step() if kind == "gradients" else training.backward([second])


def test_checkpoint_of_another_model(tmp_path):
    run(tmp_path, 0.3, until=1)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["optimizer"]
    with pytest.raises(CheckpointError, match="another model"):
        offloaded(stack(bias=True), SETTINGS, tmp_path, experts_in_memory=0.3, resume=state)
    del state["experts"]["experts"]["layers.2.experts.0"]
    with pytest.raises(CheckpointError, match=r"lacks 1 experts: layers\.2\.experts\.0"):
        offloaded(stack(), SETTINGS, tmp_path, experts_in_memory=0.3, resume=state)


def test_checkpoint_without_folder():
    training = offloaded(stack(), SETTINGS, None, experts_in_memory=1)
    state = training.state_dict()
    with pytest.raises(CheckpointError, match="storage_dir"):
        training.write(state, lambda state: state, lambda state: None)
    training.close()


@pytest.mark.parametrize(
    ("call", "code", "kind", "message"),
    [
        ("pwritev", errno.ENOSPC, CapacityError, r"no room on the disk for .*experts-"),
        ("pwritev", errno.EIO, CheckpointError, r"cannot write .*experts-\d+\.records: "),
        ("preadv", errno.EIO, CheckpointError, r"cannot read .*experts-\d+\.records: "),
    ],
)
def test_disk_fails_while_training(tmp_path, monkeypatch, call, code, kind, message, expected):
    """The error is one line with the file's name; a run resumes from the last checkpoint."""
    folder, share = fresh(tmp_path / "failing"), 0.3 if call == "pwritev" else 0.0
    run(folder, share, until=3)
    training, model, losses = begin(folder, share)

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fails)
    parts = [partial(model.loss, batches(1, tokens=100)[0])]
    with pytest.raises(kind, match=message) as failure:
        _ = [(training.backward(parts), training.step()) for _ in range(3)]
    assert "\n" not in str(failure.value)
    monkeypatch.undo()
    with contextlib.suppress(MoERuntimeError):
        training.close()
    assert len(losses) == 3
    assert run(folder, share) == expected


@pytest.mark.parametrize("moment", ["flush", "checkpoint file"])
def test_checkpoint_that_cannot_be_written_leaves_the_last_one(
    tmp_path, monkeypatch, moment, expected
):
    folder = fresh(tmp_path / "full")
    run(folder, 0.3, until=3)
    training, model, losses = begin(folder, 0.3)
    training.backward([partial(model.loss, batches(STEPS)[3])], rate=rate_of(3))
    training.step(rate_of(3))

    def fails(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync" if moment == "flush" else "fsync", fails)
    save(training, folder / "checkpoint.pt", losses)
    with pytest.raises((CapacityError, OSError), match="No space left"):
        training.wait()
    monkeypatch.undo()
    with contextlib.suppress(MoERuntimeError, OSError):
        training.close()
    assert not list(folder.glob("*.partial"))
    assert run(folder, 0.3) == expected


@pytest.mark.parametrize(
    ("call", "code", "kind", "message"),
    [
        ("open", errno.EROFS, CheckpointError, "cannot open .*: Read-only file system"),
        ("open", errno.EACCES, CheckpointError, "cannot open .*: Permission denied"),
        ("posix_fallocate", errno.ENOSPC, CapacityError, "no room on the disk for .* of "),
    ],
)
def test_folder_that_cannot_be_used(tmp_path, monkeypatch, call, code, kind, message):
    plain = getattr(os, call)

    def fails(target: object, *rest: object, **options: object) -> object:
        if call == "posix_fallocate" or "experts-" in str(target):
            raise OSError(code, os.strerror(code))
        return plain(target, *rest, **options)

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(kind, match=message) as failure:
        offloaded(stack(), SETTINGS, tmp_path, experts_in_memory=0.3)
    assert "\n" not in str(failure.value)


def test_a_checkpoint_writes_what_changed_since_the_last(tmp_path):
    """Experts in memory without an update are not written; those on the disk are there already."""
    settings = moe_runtime.AdamW(untouched="sparse_skip")
    for share in (0.0, 1.0):
        training = offloaded(model := stack(), settings, tmp_path, experts_in_memory=share)
        save(training, tmp_path / "checkpoint.pt", [])
        training.wait()
        layout = next(iter(training.optimizer.records.experts.values())).layout
        for x in batches(3, tokens=2):
            training.backward([partial(model.loss, x)])
            training.step()
            changed = sum(int((layer.aux.routing.counts_E > 0).sum()) for layer in model.layers)
            training.optimizer.records.wait_for_transfers()
            before = training.stats().traffic.written_bytes
            save(training, tmp_path / "checkpoint.pt", [])
            training.wait()
            written = training.stats().traffic.written_bytes - before
            assert written == (changed * layout.state_bytes if share else 0)
            assert changed < len(training.optimizer.records.experts)
        training.close()


def test_short_writes_are_finished(tmp_path, monkeypatch, expected):
    plain = os.pwritev

    def half(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        size = max(4096, len(buffers[0]) // 2 // 4096 * 4096)
        return plain(descriptor, [buffers[0][:size]], offset)

    monkeypatch.setattr(os, "pwritev", half)
    assert run(fresh(tmp_path / "short"), 0.3) == expected
