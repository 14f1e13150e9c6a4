"""The device that computes for experts in host memory: which it is, and who has its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from moe_runtime.config import MemorySize, format_bytes, parse_budget
from moe_runtime.errors import CapacityError
from moe_runtime.inference.budget import available_device_bytes, resolve_budget
from moe_runtime.memory.device.cuda_device import open_device
from moe_runtime.training.offload.execution.device_link import (
    DEVICE_BUFFERS,
    HOST_BUFFERS,
    DeviceLink,
    buffer_bytes,
)
from moe_runtime.training.offload.memory import DEFAULT_ACTIVATION_SHARE
from moe_runtime.training.offload.optimizers.device_updates import DeviceUpdates
from moe_runtime.training.offload.states.records import RecordLayout
from moe_runtime.training.offload.states.states import ExpertStates

CPU = torch.device("cpu")


def computing_device(model: nn.Module, expert_parameters: Iterable[nn.Parameter]) -> torch.device:
    """Where a model computes: where everything of it lies but its experts.

    Raises:
        ValueError: it lies on several devices.
    """
    experts = {id(parameter) for parameter in expert_parameters}
    tensors = [p for p in model.parameters() if id(p) not in experts] or list(model.parameters())
    places = {tensor.device for tensor in tensors if not tensor.is_meta}
    if len(places) > 1:
        names = " and ".join(sorted(map(str, places)))
        raise ValueError(
            f"everything but the experts must be on one device, this model is on {names}"
        )
    return places.pop() if places else CPU


def link_bytes(layouts: Iterable[RecordLayout], place: torch.device) -> int:
    """Locked host memory of a link beside the records; 0 where the CPU computes."""
    return 0 if place.type == "cpu" else HOST_BUFFERS * buffer_bytes(_largest(layouts))


def open_link(states: ExpertStates, place: torch.device) -> DeviceLink | None:
    """The way between records and the device; None where the CPU computes.

    Raises:
        CapacityError: memory cannot be had, or not be locked.
        ValueError: the device is none that experts can be computed on.
    """
    if place.type == "cpu":
        return None
    section = _largest(state.layout for state in states.experts.values())
    return DeviceLink(open_device(place), section, states.slab)


def held_bytes(
    model: nn.Module, expert_parameters: Iterable[nn.Parameter], place: torch.device
) -> int:
    """Bytes of a model's parameters that are on a device already, the experts' left out."""
    experts = {id(parameter) for parameter in expert_parameters}
    there = [p for p in model.parameters() if p.device == place and id(p) not in experts]
    return sum(parameter.numel() * parameter.element_size() for parameter in there)


def device_budget(device_memory: MemorySize, place: torch.device, held: int) -> int:
    """Bytes that a budget of a device stands for.

    Args:
        device_memory: bytes, a size, a share of what is free there, or "auto".
        place: the device.
        held: bytes that are taken there already, and count as free.

    Raises:
        CapacityError: there is not so much.
        ValueError: the size cannot be read.
    """
    budget = parse_budget(device_memory, name="device_memory")
    return resolve_budget(budget, available_device_bytes(place) + held, "the device")


def device_shares(
    device_memory: MemorySize,
    activation_memory: MemorySize,
    place: torch.device,
    layouts: Sequence[RecordLayout],
    *,
    dense: int,
    held: int,
    updates: DeviceUpdates | None,
) -> tuple[int, int]:
    """What a budget on the device is divided into: activations, and weights of experts that stay.

    Args:
        device_memory: the budget; "auto" keeps no weights there.
        activation_memory: the part of it for activations: bytes, a size, or a share.
        place: the device.
        layouts: of the experts' records.
        dense: bytes of everything else with its states.
        held: bytes of it that are on the device already, and not free.
        updates: that are made there, of one record at a time.

    Raises:
        CapacityError: the budget is too small; names the smallest that works.
        ValueError: a size cannot be read.
    """
    activations = parse_budget(activation_memory, name="activation_memory")
    given = device_budget(device_memory, place, held)
    kept = activations.resolve(given, auto_share=DEFAULT_ACTIVATION_SHARE)
    in_use = DEVICE_BUFFERS * buffer_bytes(_largest(layouts))
    if updates is not None:
        in_use += max((layout.record_bytes for layout in layouts), default=0)
    smallest = dense + kept + in_use
    if given < smallest:
        raise CapacityError(
            f"a device_memory of {format_bytes(given)} is too small: the smallest that works is "
            f"{format_bytes(smallest, up=True)} ({smallest} bytes): {format_bytes(dense)} for the "
            f"dense parameters and their states, {format_bytes(kept)} for activations, and "
            f"{format_bytes(in_use)} for the experts in use",
            smallest_bytes=smallest,
        )
    return kept, 0 if device_memory == "auto" else given - smallest


def _largest(layouts: Iterable[RecordLayout]) -> int:
    return max((layout.section_bytes for layout in layouts), default=0)
