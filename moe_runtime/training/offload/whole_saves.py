"""Saves of a model whose experts are with its optimizer: whole, or not at all."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from moe_runtime.errors import UnsupportedUseError
from moe_runtime.training.offload.site import ExpertsModuleSpec


def require_whole_saves(model: nn.Module, sites: Sequence[ExpertsModuleSpec]) -> None:
    """Makes ``save_pretrained`` of a model refuse to leave the experts out.

    Args:
        model: about to give its experts up; nothing happens where it is not of transformers.
        sites: its experts.
    """
    if not hasattr(model, "save_pretrained"):
        return
    save = cast(Any, type(model)).save_pretrained
    names = [f"{site.name}.{name}" for site in sites for name in site.parameter_names]

    @functools.wraps(save)
    def save_whole(
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        lacking = [name for name in names if state_dict is None or name not in state_dict]
        if lacking:
            raise UnsupportedUseError(
                f"{lacking[0]} is with the optimizer of offload_training, not in the model, and "
                "would be missing: give save_pretrained a state_dict with the experts "
                "(`stacked(layer)` of the optimizer has a layer's), or train with "
                "`moe-runtime finetune`, which writes them expert by expert"
            )
        save(model, save_directory, is_main_process, state_dict, **options)

    model.__dict__["save_pretrained"] = save_whole
