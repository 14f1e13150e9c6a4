"""A model with experts off memory is saved and stepped as a whole, or refused."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from finetuning_runs import MIXTRAL as FINETUNED
from finetuning_runs import checkpoint_of, resident
from moe_families import FAMILIES
from offloaded_models import batches, budget_for, offloaded, save, stack
from safetensors.torch import save_file, save_model
from text_checkpoint import tiny_tokenizer
from tiny_checkpoints import PROMPT, tiny_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import moe_runtime
from moe_runtime.research.zeroth_order import offload_zeroth_order
from moe_runtime.training.offload import OffloadedTraining

MIXTRAL = next(family for family in FAMILIES if family.folder == "mixtral")
OFFLOADS = {
    "offload_training": moe_runtime.offload_training,
    "offload_zeroth_order": offload_zeroth_order,
}
WAYS: dict[str, Callable[[Any, Path], object]] = {
    "state_dict": lambda m, path: torch.save(m.state_dict(), path),
    "submodule": lambda m, path: torch.save(m.model.layers[0].mlp.state_dict(), path),
    "module": torch.save,
    "pickle": lambda m, path: pickle.dumps(m),
    "deepcopy": lambda m, path: copy.deepcopy(m),
    "deepcopy_of_a_part": lambda m, path: copy.deepcopy(m.model.layers),
    "safetensors_model": lambda m, path: save_model(m, str(path)),
    "safetensors_state": lambda m, path: save_file(m.state_dict(), path),
    "dcp": lambda m, path: dcp.save({"model": m.state_dict()}, checkpoint_id=path, no_dist=True),
    "dcp_full": lambda m, path: get_model_state_dict(
        m, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    ),
    "clone": lambda m, path: {name: tensor.clone() for name, tensor in m.state_dict().items()},
    "vector": lambda m, path: nn.utils.parameters_to_vector(m.parameters()),
    "save_pretrained": lambda m, path: m.save_pretrained(path),
    "given_its_own_state": lambda m, path: m.save_pretrained(path, state_dict=m.state_dict()),
    "save_pretrained_of_a_part": lambda m, path: m.model.save_pretrained(path),
}


class Repeated(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": PROMPT[0], "labels": PROMPT[0]}


def with_adapters(model: Any) -> Any:
    """Adapters on the queries alone; everything else is frozen."""
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, settings)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), max_steps=2, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", OFFLOADS)
def test_a_save_without_experts_is_refused(tmp_path, name):
    training = OFFLOADS[name](tiny_model(MIXTRAL), host_memory="64MiB")
    for number, (way, save_it) in enumerate(WAYS.items()):
        path = tmp_path / str(number)
        with pytest.raises(BaseException, match="with the optimizer") as found:
            save_it(training.model, path)
        is_ours = isinstance(found.value, moe_runtime.UnsupportedUseError)
        assert is_ours or way == "dcp", way  # which has an error of its own around
        assert "\n" not in str(found.value) or way == "dcp", way
        assert "save_pretrained" not in way or not path.exists(), way
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(moe_runtime.UnsupportedUseError, match="saves a checkpoint"):
            copied(training)
    training.close()


def test_a_save_with_the_experts_is_whole(tmp_path):
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


def test_a_checkpoint_by_write_goes_back_into_the_model(tmp_path):
    """The model's part of the state has no experts; the optimizer's part brings them."""
    settings = moe_runtime.AdamW()
    training = offloaded(stack(), settings, tmp_path, experts_in_memory=0.4)
    training.model.loss(batches(1)[0]).backward()
    training.step()
    wanted = [training.stacked(layer) for layer in range(3)]
    save(training, tmp_path / "saved", [])
    training.close()
    state = torch.load(tmp_path / "saved")
    assert state["model"]
    assert not any(".experts." in name for name in state["model"])
    model = stack()
    again = offloaded(model, settings, tmp_path, experts_in_memory=1, resume=state["optimizer"])
    model.load_state_dict(state["model"])
    for layer, stacked in enumerate(wanted):
        assert all(torch.equal(t, stacked[name]) for name, t in again.stacked(layer).items())
    with pytest.raises(RuntimeError, match="cannot be given"):
        model.load_state_dict(stack().state_dict())
    again.close()


def test_with_adapters_the_base_is_refused_and_the_adapters_are_whole(tmp_path):
    expected, model = with_adapters(tiny_model(MIXTRAL)), with_adapters(tiny_model(MIXTRAL))
    training = moe_runtime.offload_training(model, host_memory="64MiB")
    expected.save_pretrained(tmp_path / "expected")
    model.save_pretrained(tmp_path / "adapters")
    found, wanted = (
        tmp_path / name / "adapter_model.safetensors" for name in ("adapters", "expected")
    )
    assert found.read_bytes() == wanted.read_bytes()
    for base in (model.get_base_model(), model.merge_and_unload()):
        with pytest.raises(moe_runtime.UnsupportedUseError, match="state_dict with the experts"):
            base.save_pretrained(tmp_path / "base")
        with pytest.raises(moe_runtime.UnsupportedUseError, match="with the optimizer"):
            save_file(base.state_dict(), tmp_path / "base.safetensors")
    assert not (tmp_path / "base").exists()
    training.close()


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_a_trainer_that_would_step_without_the_experts_is_refused(tmp_path, clip_norm):
    model = tiny_model(MIXTRAL)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training = moe_runtime.offload_training(model, host_memory="64MiB")
    with pytest.raises(moe_runtime.UnsupportedUseError, match="moe-runtime finetune") as found:
        Trainer(
            model, arguments(tmp_path, max_grad_norm=clip_norm), train_dataset=Repeated()
        ).train()
    assert "AdamW(clip_norm=...)" in str(found.value)
    assert all(torch.equal(p, first[n]) for n, p in model.named_parameters() if "experts" not in n)
    training.close()


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_trls_trainers_train_as_in_memory(tmp_path, kind):
    """DPO with a reference model, and GRPO with rewards of generated texts."""
    trl = pytest.importorskip("trl", reason="make test-clients installs it")
    from datasets import Dataset

    folder = checkpoint_of(FINETUNED, tmp_path / "first")
    texts = ["store ", "it reads ", "the store "]
    columns = {"prompt": texts, "chosen": texts[::-1], "rejected": texts[1:] + texts[:1]}
    shared: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 4, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
        "max_grad_norm": 0, "logging_steps": 1, "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
    }  # fmt: skip
    found = []
    for is_offloaded in (False, True):
        model: Any = resident(folder)
        model.config._name_or_path = str(folder)
        options: dict[str, Any] = {"processing_class": tiny_tokenizer()}
        make: Any = {"SFT": trl.SFTTrainer, "DPO": trl.DPOTrainer}.get(kind)
        if kind == "SFT":
            settings: Any = trl.SFTConfig(**shared)
            options["train_dataset"] = Dataset.from_dict({"input_ids": PROMPT.tolist() * 4})
        elif kind == "DPO":
            settings = trl.DPOConfig(**shared, beta=0.1)
            options["train_dataset"] = Dataset.from_dict(columns)
        else:
            sizes = {"num_generations": 2, "max_completion_length": 5}
            settings = trl.GRPOConfig(**shared, **sizes, beta=0.1)
            make = partial(trl.GRPOTrainer, reward_funcs=distinct_words)
            options["train_dataset"] = Dataset.from_dict({"prompt": texts})
        if is_offloaded:
            training = offloaded(
                model, moe_runtime.AdamW(lr=1e-3, weight_decay=0), tmp_path, experts_in_memory=0.4
            )
            trainer = make(model=model, args=settings, **options)
            if kind != "SFT":
                settings.sync_ref_model = True
                with pytest.raises(moe_runtime.UnsupportedUseError, match="sync_ref_model would"):
                    training.attach(trainer)
                settings.sync_ref_model = False
            training.attach(trainer)
        else:
            adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0, fused=True)
            trainer = make(model=model, args=settings, optimizers=(adamw, None), **options)
        trainer.train()
        found.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert found[0] == found[1]
    assert training.num_steps == len(found[0]) == 4
    training.close()


def test_a_trainer_of_adapters_around_frozen_experts_trains_as_in_memory(tmp_path):
    models = [with_adapters(tiny_model(MIXTRAL)) for _ in range(2)]
    training = moe_runtime.offload_training(models[1], host_memory="64MiB")
    for model in models:
        Trainer(model, arguments(tmp_path, seed=1), train_dataset=Repeated()).train()
    named = dict(models[1].named_parameters())
    lora = {name: p for name, p in models[0].named_parameters() if p.requires_grad}
    for name, parameter in lora.items():
        torch.testing.assert_close(named[name], parameter, rtol=1e-4, atol=1e-6)
    training.close()


def test_gradients_beside_the_experts_alone_are_refused():
    """torch would clip, step and forget only a part of the gradients."""
    model = stack()
    training = moe_runtime.offload_training(
        model, host_memory=budget_for(model, moe_runtime.AdamW(), experts_in_memory=1),
        activation_memory=2**16,
    )  # fmt: skip
    adamw = torch.optim.AdamW(model.parameters())
    adamw.zero_grad()
    model.zero_grad()
    model.loss(batches(1)[0]).backward()
    for step in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), model.zero_grad, adamw.step,
        lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    ):  # fmt: skip
        with pytest.raises(moe_runtime.UnsupportedUseError, match="gradients of the experts"):
            step()
    training.step()
    model.zero_grad()  # there are none
    training.close()


@pytest.mark.parametrize("offload", OFFLOADS.values())
def test_what_comes_after_offloading_is_refused(offload):
    """New adapters would not be trained, and experts frozen later would be."""
    model: Any = tiny_model(MIXTRAL)
    training = offload(model, host_memory="64MiB")
    with pytest.raises(moe_runtime.UnsupportedUseError, match="freeze parameters"):
        model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad)
    model.model.layers[0].added = nn.Linear(2, 2)
    work = partial(training.backward, [lambda: model(PROMPT, labels=PROMPT).loss])
    if isinstance(training, OffloadedTraining):
        work()
        work = training.step
    with pytest.raises(moe_runtime.UnsupportedUseError, match=r"layers\.0\.added"):
        work()
    training.close()


def test_a_backward_pass_of_training_by_forward_passes_is_refused():
    model: Any = tiny_model(MIXTRAL)
    training = offload_zeroth_order(model, host_memory="64MiB")
    with pytest.raises(moe_runtime.UnsupportedUseError, match="forward passes alone"):
        model(PROMPT, labels=PROMPT).loss.backward()
    training.close()
