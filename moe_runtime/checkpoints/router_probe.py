"""How many experts routers choose: seen in what they give for a token on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe_runtime.checkpoints.expert_map import ExpertsModule


def chosen_per_token(model: PreTrainedModel, modules: Sequence[ExpertsModule]) -> int:
    """Experts that a token visits in a layer, in the layer where they are most.

    A block around experts is given a hidden state; a layer that needs more than that is asked
    through its router. Where neither computes on the meta device, the configuration is asked.

    Args:
        model: on the meta device.
        modules: its experts.
    """
    text = model.config.get_text_config()
    found: list[int] = []
    for experts in modules:
        block = model.get_submodule(experts.name.rpartition(".")[0])
        width = next(experts.module.parameters()).shape[1 if experts.module.is_transposed else 2]
        for size in dict.fromkeys((text.hidden_size, width)):
            hidden = torch.zeros(1, 1, size, device="meta", dtype=model.dtype)
            if sizes := [*_choices(block, experts, hidden)]:
                found.append(min(max(sizes), experts.num_experts))
                break
    return max(found, default=getattr(text, "num_experts_per_tok", None) or 1)


def _choices(block: Any, experts: ExpertsModule, hidden: torch.Tensor) -> Iterator[int]:
    """What experts are asked for, or the last sizes of whole numbers that a router gives."""
    chosen: list[int] = []

    def forward(x: torch.Tensor, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        chosen.append(ids.shape[-1])
        return torch.zeros_like(x)

    experts.module.forward = forward
    _call(block, hidden)
    del experts.module.forward
    yield from chosen
    for part in () if chosen else block.children():
        given = None if part is experts.module else _call(part, hidden.flatten(0, 1))
        for tensor in given if isinstance(given, tuple) else ():
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.int64, torch.int32):
                yield tensor.shape[-1]


@torch.no_grad()
def _call(part: Any, hidden: torch.Tensor) -> Any:
    """What a part gives, or None where it needs more or what the meta device has not."""
    given: dict[str, Any] = {}
    if "input_ids" in inspect.signature(part.forward).parameters:
        given["input_ids"] = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        return part(hidden, **given)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
