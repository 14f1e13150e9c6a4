"""Gradients of tiny models of `moe_families`, and how far apart those of two models are."""

from collections.abc import Mapping
from typing import Any

import torch
from moe_families import Family
from tiny_checkpoints import PROMPT
from torch import Tensor

from moe_runtime.inference.hugging_face.absent import AbsentTensor


def loss_of(model: Any, family: Family, prompt: Tensor = PROMPT) -> Tensor:
    """Of a prompt: the logits, each with a weight of its own."""
    part = getattr(model, family.part) if family.part else model
    extra: dict[str, Any] = {name: torch.tensor([ids]) for name, ids in family.inputs.items()}
    if family.decodes:
        extra["use_cache"] = False
    logits = part(input_ids=prompt, **extra).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return (logits.float() * weights).sum()


def gradients_of(model: Any, family: Family, prompt: Tensor = PROMPT) -> dict[str, Tensor]:
    """Of all parameters that require one and move the loss, in fp32 at least; none is kept."""
    loss_of(model, family, prompt).backward()
    return take_gradients(model)


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
