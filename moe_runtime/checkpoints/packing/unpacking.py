"""A packed checkpoint as the plain one that it stands for: what its tensors are called.

Where experts lay before is not known any more. They get the names that transformers has for them in
checkpoints; the conversion table is run backwards on tensors without content.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import torch

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.expert_tensors import CheckpointExperts, TensorsOf
from moe_runtime.checkpoints.opening import TORCH_DTYPES, Checkpoint
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def as_plain(
    model: PreTrainedModel, checkpoint: Checkpoint, experts: ExpertMap
) -> tuple[Checkpoint, ExpertMap]:
    """The plain checkpoint, of which the file of experts does not exist yet, and its experts.

    Args:
        model: on the meta device, of the packed checkpoint.
        checkpoint: the packed one.
        experts: where its experts lie.

    Raises:
        UnsupportedModelError: names of the family's experts are known to transformers alone.
    """
    assert checkpoint.runs is not None
    state = {}
    for described, layer in zip(experts.modules, checkpoint.runs.manifest.layers, strict=True):
        if type(described.module).__module__.startswith("moe_runtime."):
            raise UnsupportedModelError(
                f"{checkpoint.folder}: experts of {model.config.model_type} cannot be given the "
                "names again that they had before they were packed; save the model of the "
                "checkpoint that was packed"
            )
        dtypes = {form.name: form.dtype for form in layer.matrices}
        for name in described.parameters:
            matrix = name.replace("gate_up_proj", "up").replace("_proj", "")
            parameter = described.module.get_parameter(name).detach()
            state[f"{described.name}.{name}"] = parameter.to(dtypes[matrix])
    runs = checkpoint.runs.names
    entries = {name: entry for name, entry in checkpoint.entries.items() if name not in runs}
    file, end = checkpoint.folder / "unpacked.safetensors", 0
    for name, tensor in private.revert_weight_conversion(model, state).items():
        shape, size = tuple(tensor.shape), math.prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = TensorEntry(name, file, _NAMES[tensor.dtype], shape, end, size)
        end += size
    plain = dataclasses.replace(checkpoint, entries=entries, packed={}, runs=None)
    return plain, map_experts(model, plain)


@contextmanager
def unpacked(experts: ExpertMap) -> Iterator[TensorsOf]:
    """Gives experts of a packed checkpoint as their modules would have them, in fp32."""
    names = [described.parameters for described in experts.modules]
    with closing(CheckpointExperts(experts, names, torch.float32)) as source:
        yield lambda key: dict(zip(names[key.layer], source.tensors_of(key), strict=True))
