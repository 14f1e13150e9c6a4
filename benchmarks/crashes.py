"""Kill offloaded training and cut its power at random moments; check that nothing is lost.

`python benchmarks/crashes.py --kills 50 --seeds 0 --save` trains with experts on the disk and a
checkpoint after every step, in a process that is killed at a random instant, again and again. Every
other kill is a power cut as well: a random half of the blocks that were not flushed gets its old
content back. The losses must be those of an undisturbed run.
"""

import json
import multiprocessing
import os
import random
import signal
import struct
import sys
import tempfile
import threading
from argparse import Namespace
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_runtime import AdamW, MoELayer, offload_training
from moe_runtime.benchmarks.harness import scripting
from moe_runtime.benchmarks.harness.scripting import option
from moe_runtime.benchmarks.suite import facts
from moe_runtime.files import write_atomically
from moe_runtime.training.offload import disk
from moe_runtime.training.offload.disk import RecordFile

STEPS = 12
COUNTED = ("kills", "power_cuts", "blocks_lost", "runs", "beginnings")
WIDTH, HIDDEN, EXPERTS, LAYERS = 64, 128, 8, 3
RECORD_BYTES = 16 * 3 * WIDTH * HIDDEN
SHARES = (0.0, 0.3, 0.6, 1.0)
LONGEST_S = 0.8
BLOCK = 4096
HEADER = struct.Struct("<qq")


class Model(nn.Module):
    """Residual layers of experts, with the same weights on every call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            MoELayer(WIDTH, HIDDEN, EXPERTS, top_k=2) for _ in range(LAYERS)
        )

    def loss(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Journaled(RecordFile):
    """A file that journals the content which unflushed writes replace."""

    def __init__(self, path: Path, *place: int, direct: bool = True) -> None:
        super().__init__(path, *place, direct=direct)
        self._lock = threading.Lock()
        self._journal = os.open(_journal(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, offset: int, content: memoryview) -> int:
        with self._lock:
            with self.path.open("rb") as plain:
                plain.seek(offset)
                before = plain.read(len(content))
            os.write(self._journal, HEADER.pack(offset, len(before)) + before)
            return super().write(offset, content)

    def sync(self) -> None:
        with self._lock:
            super().sync()
            os.truncate(_journal(self.path), 0)


def _journal(path: Path) -> Path:
    return path.with_suffix(".undo")


def cut_power(folder: Path, dice: random.Random) -> int:
    """Restore the old content of a random half of the unflushed blocks, the newest first."""
    lost = 0
    for journal in folder.glob("*.undo"):
        content, place, entries = journal.read_bytes(), 0, []
        while place + HEADER.size <= len(content):
            offset, size = HEADER.unpack_from(content, place)
            place += HEADER.size + size
            # a kill during the last entry leaves it incomplete, and its write never happened
            if place <= len(content):
                entries.append((offset, content[place - size : place]))
        with journal.with_suffix(".records").open("r+b") as file:
            for offset, before in reversed(entries):
                for start in range(0, len(before), BLOCK):
                    if dice.random() < 0.5:
                        file.seek(offset + start)
                        file.write(before[start : start + BLOCK])
                        lost += 1
        os.truncate(journal, 0)
    return lost


def train(folder: Path, share: float) -> None:
    """Continue from the last checkpoint to the end, with a checkpoint after every step."""
    disk.RecordFile = Journaled  # type: ignore[misc]
    torch.set_num_threads(1)
    file = folder / "checkpoint.pt"
    state = torch.load(file, weights_only=True) if file.exists() else None
    model = Model()
    slots = max(3, round(share * EXPERTS * LAYERS))
    dense = 16 * sum(p.numel() for n, p in model.named_parameters() if ".experts." not in n)
    training = offload_training(
        model,
        host_memory=dense + 2**20 + (slots + 1) * RECORD_BYTES,
        activation_memory=2**20,
        storage_dir=folder,
        optimizer=AdamW(weight_decay=0.1),
        resumes=state is not None,
    )
    losses: list[float] = []
    if state is not None:
        training.load_state_dict(state["optimizer"])
        model.load_state_dict(state["model"])
        losses = state["losses"]
    while len(losses) < STEPS:
        generator = torch.Generator().manual_seed(len(losses))
        x = torch.randn(24, WIDTH, generator=generator)
        (loss,) = training.backward([partial(model.loss, x)], rate=0.01)
        training.step(0.01)
        losses.append(float(loss))
        saved = {"model": model.state_dict(), "optimizer": training.state_dict(), "losses": losses}
        training.write(saved, lambda found: found["optimizer"], partial(_save, file))
    training.close()
    (folder / "losses.json").write_text(json.dumps(losses))


def _save(file: Path, state: dict[str, Any]) -> None:
    with write_atomically(file) as opened:
        torch.save(state, opened)


def begin(folder: Path, share: float) -> ForkProcess:
    process = multiprocessing.get_context("fork").Process(target=train, args=(folder, share))
    process.start()
    return process


def disturb(kills: int, seed: int, place: Path) -> dict[str, int]:
    """Kill the training this many times."""
    dice, whole, folder = random.Random(seed), place / "run-0", place / "run-1"
    whole.mkdir()
    folder.mkdir()
    begin(whole, 0.3).join()
    counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
    while True:
        is_last = counts["kills"] >= kills
        process = begin(folder, 0.3 if is_last else dice.choice(SHARES))
        process.join(None if is_last else dice.uniform(0, LONGEST_S))
        process.kill()  # no effect if it has ended
        process.join()
        if process.exitcode == -signal.SIGKILL:
            counts["kills"] += 1
            counts["beginnings"] += not (folder / "checkpoint.pt").exists()
            if counts["kills"] % 2:
                counts["power_cuts"] += 1
                counts["blocks_lost"] += cut_power(folder, dice)
            continue
        if process.exitcode:
            raise SystemExit(f"seed {seed}, kill {counts['kills']}: a process could not go on")
        found, expected = ((one / "losses.json").read_text() for one in (folder, whole))
        if found != expected:
            raise SystemExit(f"seed {seed}: losses {found}, undisturbed {expected}")
        counts["runs"] += 1
        if is_last:
            return counts
        folder = place / f"run-{counts['runs'] + 1}"
        folder.mkdir()


@scripting.script(
    kills=option(50, "with each seed"),
    seeds=option([0], type=int, nargs="+"),
    folder=option(None, "on the disk to be tried", type=scripting.present_folder),
)
def main(options: Namespace) -> int:
    settings = {"kills": options.kills, "steps": STEPS}
    results = scripting.ScriptResults("crashes", options, settings, facts("count", *COUNTED))
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results.add(f"seed {seed}", [disturb(options.kills, seed, Path(folder))])
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
