"""Saves of a model whose experts are with its optimizer: whole, or not at all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.checkpoints.transformers_private import has_adapters
from moe_runtime.errors import UnsupportedUseError
from moe_runtime.training.offload.site import ExpertsModuleSpec


def require_whole_saves(model: nn.Module, sites: Sequence[ExpertsModuleSpec]) -> None:
    """Makes ``save_pretrained`` of a model and of its parts refuse to leave experts out.

    Args:
        model: about to give its experts up; nothing happens where no part is of transformers.
        sites: its experts.
    """
    parameters = {
        f"{site.name}.{name}": site.module.get_parameter(name)
        for site in sites
        for name in site.parameter_names
    }
    trained = {name: parameter.requires_grad for name, parameter in parameters.items()}
    for path, part in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {n.removeprefix(prefix): t for n, t in trained.items() if n.startswith(prefix)}
        if own and hasattr(type(part), "save_pretrained"):
            part.__dict__["save_pretrained"] = _whole_save(part, own)


def _whole_save(model: Any, trained: Mapping[str, bool]) -> Any:
    """A model's ``save_pretrained`` that refuses.

    Args:
        model: of transformers or PEFT.
        trained: for each parameter of the experts, whether it is trained.
    """
    save = cast(Any, type(model)).save_pretrained

    @functools.wraps(save)
    def save_whole(*args: Any, **options: Any) -> None:
        bound = inspect.signature(save).bind(model, *args, **options).arguments
        state_dict = {**bound, **bound.get("kwargs", {})}.get("state_dict") or {}
        # adapters are saved without what they adapt
        saves_adapters = has_adapters(model) or hasattr(model, "get_base_model")
        needed = [name for name, is_trained in trained.items() if is_trained or not saves_adapters]
        lacking = [name for name in needed if not _is_here(state_dict.get(name))]
        if lacking:
            raise UnsupportedUseError(
                f"{lacking[0]} is with the optimizer of offload_training, not in the model, and "
                "would be missing: give save_pretrained a state_dict with the experts "
                "(`stacked(layer)` of the optimizer has a layer's), or train with "
                "`moe-runtime finetune`, which writes them expert by expert"
            )
        save(model, *args, **options)

    return save_whole


def _is_here(tensor: Tensor | None) -> bool:
    return tensor is not None and not isinstance(tensor, TrainedElsewhere)
