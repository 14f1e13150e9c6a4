"""Gradients, training and adapters: rows of the table of features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_models import NOT_HERE, is_dense, logits, refused
from feature_rows import Feature, outcome
from tiny_checkpoints import PROMPT
from torch import Tensor
from torch.autograd import forward_ad
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

TRAINING, ADAPTERS = "Training", "PEFT"


@torch.no_grad()
def autocast(model: Any, _: Path) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(PROMPT).logits


def autocast_gradient(model: Any, _: Path) -> Any:
    embedded = model.get_input_embeddings()(PROMPT).detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs_embeds=embedded, labels=PROMPT).loss
    loss.backward()
    return loss.detach().bfloat16(), embedded.grad.bfloat16()


def forward_derivative(model: Any) -> Any:
    model.set_attn_implementation("eager")  # torch has none for SDPA either
    embedded = model.get_input_embeddings()(PROMPT).detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(embedded, torch.ones_like(embedded))
        return model(inputs_embeds=dual, use_cache=False).logits


def losses_of(model: Any, steps: int = 2) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(PROMPT, labels=PROMPT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def train_attention(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "_proj" in name and is_dense(name):
            parameter.requires_grad_()
    return model.train()


def gradients_of_inputs(model: Any, change: Callable[[Any], Any]) -> Any:
    change(model)
    embedded = model.get_input_embeddings()(PROMPT).detach().requires_grad_()
    loss = model.train()(inputs_embeds=embedded, labels=PROMPT).loss
    loss.backward()
    return loss.detach(), embedded.grad, model.is_gradient_checkpointing


def input_gradients(change: Callable[[Any], Any]) -> Any:
    return lambda model, _: gradients_of_inputs(model, change)


class Repeated(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": PROMPT[0], "labels": PROMPT[0]}


def trained(model: Any, folder: Path) -> Any:
    settings = TrainingArguments(
        output_dir=str(folder), max_steps=2, save_steps=2, per_device_train_batch_size=1,
        report_to=[], use_cpu=True, disable_tqdm=True, save_only_model=True,
    )  # fmt: skip
    return Trainer(model, settings, train_dataset=Repeated()).train().training_loss


def trained_attention(model: Any, folder: Path) -> Any:
    loss = trained(train_attention(model), folder)
    again = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2")
    return torch.tensor(loss), logits(model.eval()), logits(again)


def lora(**options: Any) -> Any:
    import peft

    given = {"target_modules": ["q_proj"], **options}
    return peft.LoraConfig(r=2, init_lora_weights=False, **given)


def wrapped(model: Any, **options: Any) -> Any:
    import peft

    torch.manual_seed(5)
    return peft.get_peft_model(model, lora(**options))


def adapted(model: Any, folder: Path) -> Any:
    """Trained, saved, loaded once more, merged, saved as a whole."""
    import peft

    ours = wrapped(model).train()
    losses = losses_of(ours)
    ours.eval().save_pretrained(folder)
    alone = logits(ours)
    base = ours.unload()
    before = logits(base)
    again = peft.PeftModel.from_pretrained(base, folder)
    merged = again.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(folder / "merged")
    return losses, alone, before, logits(again), logits(merged), logits(reloaded)


def own_adapters(model: Any, folder: Path) -> Any:
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:  # 5.24 asks for a PEFT that came after it
        pytest.skip(str(error))
    torch.manual_seed(5)
    model.add_adapter(lora(), adapter_name="one")
    found = [logits(model), sorted(model.active_adapters())]
    model.disable_adapters()
    found.append(logits(model))
    model.enable_adapters()
    model.set_adapter("one")
    found.append(sorted(model.get_adapter_state_dict("one")))
    model.save_pretrained(folder)
    model.delete_adapter("one")
    model.load_adapter(str(folder), adapter_name="two")
    return [*found, logits(model), sorted(path.name for path in folder.iterdir())]


def adapter_of_experts(load: Callable[[Any, Path], Any]) -> Any:
    def trial(model: Any, folder: Path) -> Any:
        stock = AutoModelForCausalLM.from_pretrained(model.config._name_or_path)
        wrapped(stock, target_parameters=["mlp.experts.down_proj"]).save_pretrained(folder)
        return logits(load(model, folder))

    return trial


def from_peft(model: Any, folder: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(model, folder)


def with_adapter(model: Any, folder: Path) -> Any:
    model.load_adapter(str(folder))
    return model


FEATURES = [
    Feature(TRAINING, "`torch.autocast`: logits in bf16", autocast),
    Feature(TRAINING, "`torch.autocast`: gradient of inputs", autocast_gradient),
    refused(TRAINING, "forward-mode derivatives", forward_derivative,
            "has no forward-mode derivative"),
    Feature(TRAINING, "parameters outside the experts",
            lambda m, _: losses_of(train_attention(m))),
    *(Feature(TRAINING, f"gradient of inputs, {name}", input_gradients(change), methods=methods)
      for name, change, methods in (
          ("`gradient_checkpointing_enable`", lambda m: m.gradient_checkpointing_enable(),
           ("gradient_checkpointing_enable", "activation_checkpointing_enable")),
          ("`gradient_checkpointing_disable`", lambda m: m.gradient_checkpointing_disable(),
           ("gradient_checkpointing_disable", "activation_checkpointing_disable")),
          ("`enable_input_require_grads`", lambda m: m.enable_input_require_grads(),
           ("enable_input_require_grads",)),
          ("`disable_input_require_grads`",
           lambda m: (m.enable_input_require_grads(), m.disable_input_require_grads()),
           ("disable_input_require_grads",)),
      )),
    Feature(TRAINING, "`Trainer`, parameters outside the experts, its checkpoints whole",
            trained_attention),
    Feature(TRAINING, "`Trainer` without anything to train", trained, "is frozen"),
    refused(TRAINING, "`requires_grad_()` of the whole model", lambda m: m.requires_grad_(),
            "would train the experts too"),
    Feature(ADAPTERS, "LoRA outside the experts: train, save, load, merge, save merged", adapted),
    Feature(ADAPTERS, "adapters of transformers, outside the experts", own_adapters,
            methods=("add_adapter", "active_adapters", "disable_adapters", "enable_adapters",
                     "set_adapter", "get_adapter_state_dict", "delete_adapter", "load_adapter")),
    Feature(ADAPTERS, "`enable_peft_hotswap`", lambda m, _: outcome(m.enable_peft_hotswap),
            methods=("enable_peft_hotswap",)),
    refused(ADAPTERS, "`get_peft_model(target_parameters=...)` on experts: by its first call",
            lambda m: logits(wrapped(m, target_parameters=["mlp.experts.down_proj"])), NOT_HERE),
    refused(ADAPTERS, "`get_peft_model(target_modules=\"all-linear\")`: by its first call",
            lambda m: logits(wrapped(m, target_modules="all-linear")), NOT_HERE),
    Feature(ADAPTERS, "`PeftModel.from_pretrained`, adapters on experts: by its first call",
            adapter_of_experts(from_peft), NOT_HERE),
    Feature(ADAPTERS, "`load_adapter`, adapters on experts: by its first call",
            adapter_of_experts(with_adapter), NOT_HERE),
]  # fmt: skip
