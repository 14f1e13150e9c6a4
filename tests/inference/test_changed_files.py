"""A checkpoint that is written while a model is loaded or runs ends the run."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_runtime
from moe_runtime.errors import CheckpointError
from moe_runtime.models.pocket import pocket_path

PROMPT = torch.arange(5, 15)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(pocket_path(), tmp_path / "model")


def weights_of(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def rewrite(file: Path) -> None:
    """Other weights of the same size, in place."""
    with open(file, "r+b") as opened:
        opened.seek(os.path.getsize(file) // 3)
        old = opened.read()
        opened.seek(-len(old), os.SEEK_END)
        opened.write(old[::-1])


def rewrite_and_set_back_the_time(file: Path) -> None:
    before = os.stat(file)
    rewrite(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def load(folder: Path, **settings: Any) -> Any:
    return moe_runtime.load(folder, host_memory="17MiB", max_tokens=32, policy="lru", **settings)


def generate(model: Any) -> torch.Tensor:
    return model.generate(PROMPT, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("write", [rewrite, rewrite_and_set_back_the_time])
def test_a_file_that_is_written_ends_the_run(folder, write):
    file = weights_of(folder)
    with (model := load(folder)).moe:
        generate(model)
        write(file)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=rf"{file.name} has changed .* load it again"):
                generate(model)
        model.moe.check()


def test_a_file_that_is_replaced_or_removed_is_read_as_it_was(folder):
    file = weights_of(folder)
    with (model := load(folder)).moe:
        expected = generate(model)
        other = shutil.copyfile(file, folder / "new")
        rewrite(other)
        os.replace(other, file)
        assert torch.equal(generate(model), expected)
        file.unlink()
        assert torch.equal(generate(model), expected)


def test_other_files_of_the_folder_may_change_while_it_is_loaded(folder):
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    other = Path(shutil.copyfile(weights_of(folder), folder / "other.safetensors"))
    waiting = [partial(rewrite, other)]

    def meanwhile(what: str, done: int, total: int) -> None:
        while waiting:
            waiting.pop()()

    load(folder, progress=meanwhile).moe.close()


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_file_that_changes_while_it_is_loaded_is_refused(folder, how):
    file = weights_of(folder)
    other = shutil.copyfile(file, folder / "new")
    rewrite(other)
    waiting = [lambda: rewrite(file) if how == "written" else os.replace(other, file)]

    def meanwhile(what: str, done: int, total: int) -> None:
        while waiting:
            waiting.pop()()

    with pytest.raises(CheckpointError, match=rf"{file.name} has changed"):
        load(folder, progress=meanwhile)
