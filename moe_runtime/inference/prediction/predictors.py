"""The predictor that a caller named, whether by its name or by the file of a trained one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.policies.prediction import is_file_name, make_estimator
from moe_runtime.policies.prediction.base import Shape, shape_of
from moe_runtime.types import ModelSignature

if TYPE_CHECKING:
    from moe_runtime.policies.prediction import Estimator


def make_live_estimator(predictor: str | Path, signature: ModelSignature) -> Estimator:
    """The named estimator: trained, from a file, or one that needs no training.

    Raises:
        CheckpointError: the file cannot be used, or belongs to another model.
        ValueError: no predictor has this name.
    """
    from moe_runtime.lab.traces.learned import read_predictor

    if is_file_name(predictor):
        return read_predictor(predictor, signature)
    return make_estimator(str(predictor), shape_of(signature))


def learned_bytes(predictor: str | Path, estimator: Estimator) -> int:
    """Memory of a trained estimator's tables. Untrained counts are in the fixed reserve."""
    if not is_file_name(predictor):
        return 0
    return sum(array.nbytes for array in estimator.state().values())


def find_gate(
    model: torch.nn.Module, block_name: str, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer's gate: weight ``[E, D]`` and bias ``[E]``, if it has one.

    It is the module next to the experts, or a part of one, whose weight has a row for every expert.

    Raises:
        UnsupportedModelError: the layer has no such module.
    """
    gates = [
        (weight, getattr(part, "bias", None))
        for child in model.get_submodule(block_name).children()
        for part in (child, *child.children())
        if isinstance(weight := getattr(part, "weight", None), torch.Tensor)
        and weight.ndim == 2
        and len(weight) == shape.num_experts
    ]
    if len(gates) != 1:
        raise UnsupportedModelError(
            f"{block_name}: found no gate with {shape.num_experts} rows beside the experts; use a "
            "predictor that needs routing only, such as running-counts"
        )
    weight, bias = gates[0]
    if isinstance(bias, torch.Tensor) and bias.shape == (shape.num_experts,):
        return weight.detach(), bias.detach()
    return weight.detach(), None


def find_gates(
    model: torch.nn.Module, block_names: Sequence[str], shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """Copies of all gates, to train with: weights ``[L, E, D]`` and biases ``[L, E]``, float32.

    Raises:
        UnsupportedModelError: a layer has no gate, or the gates differ in width.
    """
    found = [find_gate(model, name, shape) for name in block_names]
    if len({weight.shape for weight, _ in found}) != 1:
        raise UnsupportedModelError("the gates of this model differ in width between layers")
    no_bias = np.zeros(shape.num_experts, dtype=np.float32)
    biases = [no_bias if bias is None else as_numpy(bias) for _, bias in found]
    return np.stack([as_numpy(weight) for weight, _ in found]), np.stack(biases)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    # each of these costs as much as a small gate, even where it has nothing to do
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is not torch.float32 and tensor.dtype is not torch.int64:
        tensor = tensor.float()
    return tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()
