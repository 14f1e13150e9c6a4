"""Tiny random checkpoints of `transformers` model families, made on the spot.

`moe_families` says what to make; this module makes it. The weights are drawn so that every part
of the model moves the logits visibly: a checkpoint whose experts hardly matter would let a wrong
expert pass.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers
from moe_families import Family
from tiny_sizes import COMMON
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

PROMPT = torch.tensor([[5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]])
NEXT_TOKEN = torch.tensor([[43]])


def model_class_of(family: Family) -> type[PreTrainedModel]:
    return getattr(transformers, family.model_class)


def tiny_config(
    config_class: type[PreTrainedConfig], overrides: dict[str, Any]
) -> PreTrainedConfig:
    """A configuration with every size that it knows made small, sub-configurations included."""
    known = {field.name for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in COMMON.items() if name in known} | overrides
    for name, sub_class in config_class.sub_configs.items():
        sub_overrides = overrides.get(name, {})
        if sub_overrides is not None:
            values[name] = tiny_config(*_sub_config(sub_class, sub_overrides))
    return config_class(**values)


def _sub_config(
    declared: type, overrides: dict[str, Any]
) -> tuple[type[PreTrainedConfig], dict[str, Any]]:
    """Some families leave the kind of a tower open; then the row names its `model_type`."""
    if declared is not AutoConfig:
        return declared, overrides
    rest = {name: value for name, value in overrides.items() if name != "model_type"}
    return CONFIG_MAPPING[overrides["model_type"]], rest


def tiny_model(family: Family) -> PreTrainedModel:
    """A model of the family with random weights, the same ones on every call, in fp32."""
    model_class = model_class_of(family)
    config = tiny_config(model_class.config_class, family.config)
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    randomise(model)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Draw matrices so that activations keep their size, and move every vector off its start."""
    for _, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not tensor.is_floating_point():
            continue
        if tensor.ndim >= 2 and isinstance(tensor, torch.nn.Parameter):
            tensor.normal_(std=tensor.shape[-1] ** -0.5)
        else:
            # Norms stay near one, biases near zero; none stays exactly there.
            tensor.add_(torch.randn_like(tensor), alpha=0.1)


def save(model: PreTrainedModel, folder: Path, *, sharded: bool, own_names: bool = False) -> Path:
    """Write a checkpoint."""
    num_bytes = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    size = num_bytes // 4 if sharded else 2 * num_bytes
    model.save_pretrained(folder, max_shard_size=size, save_original_format=not own_names)
    num_files = len(list(folder.glob("*.safetensors")))
    assert (num_files > 1) == sharded
    return folder


def experts_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """By name, the modules that `transformers` made with its experts interface."""
    return {
        name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")
    }


def stacked_experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that hold feed-forward experts, with the interface or without it."""
    return [
        module
        for name, module in model.named_modules()
        if hasattr(module, "is_concatenated")
        or (type(module).__name__.endswith("Experts") and "attention" not in name)
    ]


@torch.no_grad()
def prompt_and_step_logits(model: PreTrainedModel, family: Family) -> list[torch.Tensor]:
    """Logits for a prompt of eleven tokens, then for one more token with the prompt's cache."""
    part = getattr(model, family.part) if family.part else model
    extra = {name: torch.tensor([ids]) for name, ids in family.inputs.items()}
    if not family.decodes:
        return [part(input_ids=PROMPT, **extra).logits]
    first = part(input_ids=PROMPT, use_cache=True, **extra)
    # Some caches are changed in place by the next step.
    prompt_logits = first.logits.clone()
    step = part(input_ids=NEXT_TOKEN, past_key_values=first.past_key_values, use_cache=True)
    return [prompt_logits, step.logits]
