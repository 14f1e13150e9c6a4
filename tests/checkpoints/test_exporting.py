"""Exported models replace older ones as a whole: neither fault loses one."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest
import torch
from language_models import build, shape
from moe_families import Family
from tiny_checkpoints import save, tiny_model
from torch import Tensor

from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.export import LikeCheckpoint
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.models.lm.export import export_hugging_face
from moe_runtime.types import ExpertKey

MIXTRAL = Family("mixtral", "MixtralForCausalLM", config={"num_hidden_layers": 1})


def write_like(source: Path, folder: Path, *, failing: bool) -> None:
    """A changed model as a checkpoint like the one in `source`; fails at its second expert."""
    changed = tiny_model(MIXTRAL)
    checkpoint = open_checkpoint(source, "auto")
    model = build_on_meta(checkpoint)
    experts = map_experts(model, checkpoint)

    def tensors_of(key: ExpertKey) -> dict[str, Tensor]:
        if failing and key.expert == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        place = experts.modules[key.layer]
        module = changed.get_submodule(place.name)
        return {name: module.get_parameter(name)[key.expert] for name in place.parameters}

    LikeCheckpoint(model, checkpoint, experts).write(folder, changed.state_dict(), tensors_of)


def write_own(source: Path, folder: Path, *, failing: bool) -> None:
    def also(new: Path) -> None:
        if failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (new / "tokenizer.json").write_text("{}")

    export_hugging_face(build(shape(intermediate_size=8)), folder, also=also)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("write", [write_like, write_own])
def test_an_export_that_fails_leaves_the_old_model(tmp_path, write):
    source = tmp_path / "source"
    save(tiny_model(MIXTRAL), source, sharded=False)
    folder = tmp_path / "out" / "model"
    write(source, folder, failing=False)
    before = contents(folder)
    with pytest.raises(OSError, match="No space left"):
        write(source, folder, failing=True)
    assert contents(folder) == before
    assert os.listdir(folder.parent) == ["model"]


def test_what_is_no_model_stays_beside_an_exported_one(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"of an older model")
    export_hugging_face(build(shape(intermediate_size=8)), tmp_path, dtype=torch.float32)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors"}


def test_what_is_no_safetensors_file_is_not_written_like_one(tmp_path):
    save(tiny_model(MIXTRAL), tmp_path / "source", sharded=False)
    checkpoint = open_checkpoint(tmp_path / "source", "auto")
    entries = {
        name: dataclasses.replace(entry, file=entry.file.with_suffix(".gguf"))
        for name, entry in checkpoint.entries.items()
    }
    other = dataclasses.replace(checkpoint, entries=entries)
    model = build_on_meta(other)
    with pytest.raises(
        UnsupportedModelError, match=r"model\.gguf: only checkpoints of safetensors"
    ):
        LikeCheckpoint(model, other, map_experts(model, other))
