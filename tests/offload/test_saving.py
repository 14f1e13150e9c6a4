"""`save_pretrained` of a model whose experts are trained off memory: whole, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_families import FAMILIES
from tiny_checkpoints import PROMPT, tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import moe_runtime

MIXTRAL = next(family for family in FAMILIES if family.folder == "mixtral")
OFFLOADS = {
    "offload_training": moe_runtime.offload_training,
    "offload_zeroth_order": moe_runtime.offload_zeroth_order,
}


class Repeated(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": PROMPT[0], "labels": PROMPT[0]}


@pytest.mark.parametrize("name", OFFLOADS)
def test_a_save_without_experts_is_refused(tmp_path: Path, name: str) -> None:
    model: Any = tiny_model(MIXTRAL)
    training = OFFLOADS[name](model, host_memory="64MiB")
    with pytest.raises(moe_runtime.UnsupportedUseError, match="state_dict with the experts") as e:
        model.save_pretrained(tmp_path / "saved")
    assert "\n" not in str(e.value)
    with pytest.raises(moe_runtime.UnsupportedUseError):
        model.save_pretrained(tmp_path / "saved", state_dict=model.state_dict())
    assert not (tmp_path / "saved").exists()
    training.close()


def test_a_save_with_the_experts_is_whole(tmp_path: Path) -> None:
    expected = tiny_model(MIXTRAL)
    model: Any = tiny_model(MIXTRAL)
    training = moe_runtime.offload_training(model, host_memory="64MiB")
    state = model.state_dict()
    for layer in range(len(model.model.layers)):
        stacked = training.stacked(layer)
        state |= {f"model.layers.{layer}.mlp.experts.{n}": t for n, t in stacked.items()}
    model.save_pretrained(tmp_path / "saved", state_dict=state)
    training.close()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    wanted = expected.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in saved.state_dict().items())


def test_trainer_leaves_no_checkpoint_without_experts(tmp_path: Path) -> None:
    model = tiny_model(MIXTRAL)
    training = moe_runtime.offload_training(model, host_memory="64MiB")
    settings = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    with pytest.raises(moe_runtime.UnsupportedUseError, match="moe-runtime finetune"):
        Trainer(model, settings, train_dataset=Repeated()).train()
    assert not list(tmp_path.rglob("*.safetensors"))
    training.close()
