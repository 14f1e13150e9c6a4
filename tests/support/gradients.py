"""Gradients of tiny models of `moe_families`, and how far apart those of two models are."""

from collections.abc import Mapping
from typing import Any

import peft
import torch
from moe_families import Family
from tiny_checkpoints import PROMPT
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from moe_runtime.checkpoints.absent import AbsentTensor

NEED_IDS = ("deepseek_v4", "diffusion_gemma", "gemma4")
"""Families that use token ids beside their embeddings."""
INPUTS = "inputs_embeds"
PEFTS_OWN = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "conv1d", "out_proj")
"""Modules whose names PEFT takes to mean experts, or that it refuses in Mamba layers."""


def loss_of(model: Any, family: Family, prompt: Tensor = PROMPT, **instead: Tensor) -> Tensor:
    """Of a prompt, or what is given instead: the logits, each with a weight of its own."""
    part = getattr(model, family.part) if family.part else model
    extra: dict[str, Any] = {name: torch.tensor([ids]) for name, ids in family.inputs.items()}
    if family.decodes:
        extra["use_cache"] = False
    logits = part(**(instead or {"input_ids": prompt}), **extra).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return (logits.float() * weights).sum()


def all_gradients_of(model: Any, family: Family) -> dict[str, Tensor]:
    """Of what the embedding gives, and of all parameters that require one and move the loss."""
    part = getattr(model, family.part) if family.part else model
    leaves = []

    def embed(*call: Any) -> Tensor:
        leaves.append(call[-1].detach().requires_grad_())
        return leaves[-1]

    if family.folder in NEED_IDS:
        hook = part.get_input_embeddings().register_forward_hook(embed)
        loss = loss_of(model, family)
        hook.remove()
    else:
        loss = loss_of(model, family, inputs_embeds=embed(part.get_input_embeddings()(PROMPT)))
    loss.backward()
    return take_gradients(model) | {
        f"{INPUTS}.{place}": leaf.grad.float()
        for place, leaf in enumerate(leaves)
        if leaf.grad is not None
    }


def dense_linears(model: Any) -> list[str]:
    """Names of linear layers that can have adapters: of attention and of dense feed-forward."""
    return [
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and "layers." in name
        and name.rpartition(".")[2] not in PEFTS_OWN
    ]


def with_adapters(model: Any, places: list[str]) -> Any:
    """LoRA beside linear layers, of equal numbers in each precision; all that can be is trained."""
    settings = peft.LoraConfig(r=2, target_modules=places, init_lora_weights=False)
    peft.inject_adapter_in_model(settings, model)
    generator = torch.Generator().manual_seed(3)
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * len(places) > 0
    for _, adapter in sorted(adapters.items()):
        drawn = torch.randn(adapter.shape, generator=generator) / 2 / adapter.shape[1] ** 0.5
        adapter.data = drawn.bfloat16().to(adapter.dtype)
    return trains_all_but_experts(model)


def checkpoint_activations(model: Any, reentrant: bool | None) -> Any:
    """Computes layers again in the backward pass, in either way; None does not.

    Only the layers are told that they are in training: dropout and noise stay off.
    """
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for layer in layers:
            layer.training = True
    return model


def take_gradients(model: Any) -> dict[str, Tensor]:
    """What a backward pass left, in fp32 at least; the model has it no more."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
            parameter.grad = None
    return found


def trains_all_but_experts(model: Any) -> Any:
    """A loaded model whose parameters require gradients, as far as they are in memory."""
    for parameter in model.parameters():
        if not isinstance(parameter, AbsentTensor):
            parameter.requires_grad_(True)
    return model


def shared(model: Any, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of parameters that a loaded model has in memory: all but the experts'."""
    own = {name for name, p in model.named_parameters() if not isinstance(p, AbsentTensor)}
    return {name: gradient for name, gradient in gradients.items() if name in own}


def parameter_errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """By parameter, the norm of the difference over the norm of what is expected.

    Gradients that vanish beside the largest are measured by a thousandth of that.
    """
    assert found.keys() == expected.keys()
    least = 1e-3 * max(gradient.norm().item() for gradient in expected.values())
    return {
        name: (found[name] - gradient).norm().item() / max(gradient.norm().item(), least)
        for name, gradient in expected.items()
    }


def total_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The norm of all differences over the norm of all that is expected."""
    wrong = sum((found[name] - expected[name]).square().sum().item() for name in found)
    return (wrong / sum(expected[name].square().sum().item() for name in found)) ** 0.5
