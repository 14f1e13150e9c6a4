"""What of fine-tuning can be computed on a device, and what it may take there."""

from __future__ import annotations

from typing import Any

import torch

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.kernels.operands import find_device
from moe_runtime.training.finetune.settings import FinetuneConfig
from moe_runtime.training.offload.memory import TrainingMemory


def device_of(config: FinetuneConfig) -> torch.device:
    """Where a run computes: on the CPU, unless it is told otherwise.

    "auto" is a GPU, if there is one, but for training by forward passes alone.

    Raises:
        UnsupportedModelError: forward passes alone on a device.
        ValueError: there is no such device, or a budget of a device that does not compute.
    """
    by_forwards_alone = config.lora is None and not config.method.has_backward
    name = config.run.device or "cpu"
    place = find_device("cpu" if name == "auto" and by_forwards_alone else name, "run.device")
    if place.type == "cpu":
        if config.run.device_memory != "auto":
            raise ValueError(
                f"device_memory is for a GPU; this run is on the CPU, got "
                f"{config.run.device_memory!r}"
            )
    elif by_forwards_alone:
        raise UnsupportedModelError(
            "--zeroth-order computes on the CPU so far; give --device cpu, or train by gradients"
        )
    return place


def memory_of(
    config: FinetuneConfig, memory: TrainingMemory, place: torch.device
) -> dict[str, Any]:
    """The budgets of `TrainingMethod.offload`, which only asks for a device where there is one."""
    budgets: dict[str, Any] = {
        "host_memory": memory.budget_bytes,
        "activation_memory": memory.activation_bytes,
    }
    if place.type != "cpu":
        budgets["device_memory"] = config.run.device_memory
    return budgets
