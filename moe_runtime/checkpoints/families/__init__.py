"""Families whose blocks `transformers` builds without its experts interface.

Each module here turns the blocks of one family, in place and without touching a weight, into blocks
whose routed experts have that interface. From there on the family is like any other. A family is
one module and one row of the table below.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moe_runtime.checkpoints import transformers_private as private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe_runtime.checkpoints.transformers_private import WeightRenaming

BLOCKS = {
    "JetMoeMoE": "jetmoe",
    "Llama4TextMoe": "llama4",
    "LongcatFlashMoE": "longcat_flash",
}
"""Class of a block in `transformers`, and the module here that knows it."""


def give_experts_interface(model: PreTrainedModel) -> None:
    """Turns the blocks that are in the table, for a model on the meta device.

    Raises:
        UnsupportedModelError: a block is configured in a way that no published model has.
    """
    for block in list(model.modules()):
        name = type(block).__name__
        if name in BLOCKS:
            _load(name).adapt(block, model.config)


def checkpoint_renamings(model: PreTrainedModel) -> list[WeightRenaming]:
    """Renamings from the names in checkpoints to those that a turned model has for its weights."""
    bases = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return [
        private.WeightRenaming(source_patterns=source, target_patterns=target)
        for name in sorted(BLOCKS.keys() & bases)
        for source, target in _load(name).RENAMINGS.items()
    ]


def _load(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{BLOCKS[name]}")
