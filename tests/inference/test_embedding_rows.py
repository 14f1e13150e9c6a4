"""Embeddings whose rows stay in the checkpoint's file: the same answers, and more experts fit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from moe_families import FAMILIES

import moe_runtime
from moe_runtime.checkpoints import expert_map
from moe_runtime.errors import CheckpointError, UnsupportedUseError
from moe_runtime.inference.inspection import inspect_checkpoint

FAMILY = next(family for family in FAMILIES if family.folder == "gpt_oss")
TOKENS = torch.tensor([[3, 9, 3, 0], [95, 9, 1, 2]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_checkpoints.tiny_model(FAMILY)
    model.config.tie_word_embeddings = False
    return tiny_checkpoints.save(model, tmp_path_factory.mktemp("rows"), sharded=False)


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_map, "LEAST_EMBEDDING_BYTES", 0)


def load(folder: Path, num_slots: int | None = None) -> Any:
    summary = inspect_checkpoint(folder, dtype="float32", max_tokens=64)
    budget = 2**30
    if num_slots is not None:
        budget = summary.smallest_budget_bytes + (num_slots - 2) * summary.slot_bytes
        assert summary.slots_for(budget) == num_slots
    return moe_runtime.load(
        folder, device="cpu", dtype="float32", host_memory=budget, max_tokens=64, warm_up=False
    )


def test_rows_make_room_for_experts_and_no_bit_differs(folder):
    summary = inspect_checkpoint(folder, dtype="float32", max_tokens=64)
    embedding = tiny_checkpoints.tiny_model(FAMILY).get_input_embeddings().weight
    assert summary.embedding_bytes == embedding.nbytes
    with (resident := load(folder)).moe, (starved := load(folder, 3)).moe:
        stats = [model.moe.stats() for model in (resident, starved)]
        assert stats[0].dense_bytes - stats[1].dense_bytes == embedding.nbytes
        assert stats[1].expert_slots == 3
        for ids in (TOKENS, TOKENS[:, :1], TOKENS[:, :0]):
            embedded = [m.get_input_embeddings()(ids) for m in (resident, starved)]
            assert torch.equal(*embedded)
            assert torch.equal(embedded[0], torch.nn.functional.embedding(ids, embedding))
        logits = [tiny_checkpoints.prompt_and_step_logits(m, FAMILY) for m in (resident, starved)]
        assert all(map(torch.equal, *logits))


def test_the_weight_can_be_read_and_copied_but_not_changed(folder):
    expected = tiny_checkpoints.tiny_model(FAMILY).get_input_embeddings().weight
    with (model := load(folder, 3)).moe:
        module = model.get_input_embeddings()
        assert module.weight.shape == expected.shape
        assert torch.equal(module.weight, expected)
        assert torch.equal(module.weight.to(torch.float64), expected.double())
        assert torch.equal(
            torch.nn.functional.linear(expected, module.weight), expected @ expected.T
        )
        assert torch.equal(copy.deepcopy(module)(TOKENS), module(TOKENS))
        key = next(key for key in model.state_dict() if key.endswith("embed_tokens.weight"))
        assert torch.equal(model.state_dict()[key], expected)
        with pytest.raises(UnsupportedUseError, match="an embedding in its file"):
            module.weight.zero_()
        for token in (-1, len(expected)):
            with pytest.raises(IndexError):
                module(torch.tensor([token]))


def test_a_file_that_is_written_is_refused(folder):
    (file,) = folder.glob("*.safetensors")
    with (model := load(folder, 3)).moe:
        content = file.read_bytes()
        file.write_bytes(content[::-1])
        with pytest.raises(CheckpointError, match="has changed"):
            model.get_input_embeddings()(TOKENS)
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match="has changed"):
            model.get_input_embeddings()(TOKENS)
        file.write_bytes(content)
