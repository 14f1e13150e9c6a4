"""A checkpoint's model on one rank: dense weights whole, routed experts as pages to come."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.budget import set_up_libraries
from moe_runtime.inference.generation import end_token_ids
from moe_runtime.inference.loading import finish_dense, replace_experts, signature_of
from moe_runtime.research.elastic.paged_experts import SpreadExperts, SpreadModule
from moe_runtime.research.elastic.pages import ExpertPages
from moe_runtime.types import ExpertKey, ModelSignature

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class SpreadModel:
    """What a rank generates with.

    Attributes:
        model: the transformers model; its experts are ``modules``.
        modules: one for each layer with experts, in order.
        spread: this rank's part of the experts.
        signature: what placements must be made for.
        ends: the tokens that end a text.
        expert_form: the types of the experts' matrices, and a checksum of how they lie in pages,
            which ranks send to each other.
    """

    model: PreTrainedModel
    modules: tuple[SpreadModule, ...]
    spread: SpreadExperts
    signature: ModelSignature
    ends: frozenset[int]
    expert_form: str

    def serve_others(self) -> None:
        """Takes part in one forward pass of other ranks."""
        for module in self.modules:
            module.serve_others()


def load_spread_model(path_or_id: str | Path, *, dtype: str | torch.dtype = "auto") -> SpreadModel:
    """Loads everything but the routed experts, on the CPU.

    Args:
        path_or_id: the folder of a checkpoint, or the name of a repository on the hub.
        dtype: the type to compute in, or ``"auto"`` for the checkpoint's own.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or incomplete.
        UnsupportedModelError: its model is not one that can be spread.
    """
    checkpoint = open_checkpoint(path_or_id, dtype)
    model = build_on_meta(checkpoint)
    set_up_libraries(checkpoint.dtype)
    experts = map_experts(model, checkpoint)
    if len({module.num_experts for module in experts.modules}) > 1:
        raise UnsupportedModelError(
            f"{checkpoint.config.model_type}: layers with different numbers of experts cannot be "
            "spread over ranks yet"
        )
    signature = signature_of(checkpoint, experts)
    spread = SpreadExperts(ExpertPages(experts), signature.num_layers, signature.num_experts)
    modules = replace_experts(
        model,
        experts,
        lambda module, layer: SpreadModule(
            module, layer, spread, width=_width(experts, layer), dtype=checkpoint.dtype
        ),
    )
    finish_dense(model, checkpoint, experts, torch.device("cpu"))
    return SpreadModel(
        model=model,
        modules=tuple(modules),
        spread=spread,
        signature=signature,
        ends=frozenset(end_token_ids(model)),
        expert_form=_form(experts),
    )


def _form(experts: ExpertMap) -> str:
    pages = [(key, layout.form) for key, layout in sorted(experts.layouts.items())]
    described = repr((experts.matrices, experts.packings, pages)).encode()
    return f"{' and '.join(experts.type_names)} (layout {zlib.crc32(described):08x})"


def _width(experts: ExpertMap, layer: int) -> int:
    """D: columns of the matrix that an expert multiplies its rows by."""
    packing = experts.packings[layer].get("up")
    if packing is not None:
        return packing.num_cols
    layout = experts.layouts[ExpertKey(layer, 0)]
    return layout.tensors[experts.matrices[layer].index("up")].shape[1]
