"""How the budgets of the host and of the device that computes are divided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_runtime.config import MemorySize, format_bytes, parse_budget
from moe_runtime.errors import CapacityError
from moe_runtime.inference.budget import MemoryPlan, available_device_bytes, resolve_budget
from moe_runtime.lab.record_tiers import spread
from moe_runtime.memory.device.cuda_device import open_device
from moe_runtime.training.offload.device_link import (
    DEVICE_BUFFERS,
    HOST_BUFFERS,
    DeviceLink,
    buffer_bytes,
)
from moe_runtime.training.offload.device_updates import DeviceUpdates
from moe_runtime.training.offload.record_store import MIN_RING_SLOTS, RecordStore
from moe_runtime.training.offload.records import BLOCK_BYTES, RecordLayout
from moe_runtime.types import ExpertKey

RING_BYTES = 256 * 2**20
"""Slots between disk and computation that keep a disk busy."""

DEFAULT_ACTIVATION_SHARE = 0.25
"""Of a budget, set aside for activations."""


SPARE_BYTES = 32 * 2**20

_STEP_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """A division of host memory.

    Attributes:
        dense_bytes: weights, gradients and moments of everything but the routed experts.
        activation_bytes: for the forward and backward pass.
        link_bytes: buffers of the way to a device that computes; then the device holds dense
            parameters and activations. 0 where the CPU computes.
        saved_bytes: for a checkpoint's copy of what is dense on a device.
        copy_bytes: for weights that are kept in the type of products.
        record_bytes: one slot: an expert's weights, moments and gradient.
        ring_slots: slots that experts pass through; 0 when all live in memory.
    """

    budget_bytes: int
    dense_bytes: int
    activation_bytes: int
    link_bytes: int
    saved_bytes: int
    copy_bytes: int
    record_bytes: int
    ring_slots: int
    resident: tuple[ExpertKey, ...]
    num_experts: int

    @property
    def slot_bytes(self) -> int:
        return (self.ring_slots + len(self.resident)) * self.record_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenMemory:
    """A division of memory where experts are frozen and stay in the checkpoint's files.

    Attributes:
        host: slots alone, and a checkpoint's copy, where a device computes.
        device: of the device that computes; None where that is the CPU.
    """

    host: MemoryPlan
    device: MemoryPlan | None = None


def dense_bytes(model: nn.Module, expert_parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of a model's parameters and buffers but the experts, with gradients and moments."""
    around = _around(model, expert_parameters)
    trained = _bytes_of(p for p in around if p.requires_grad)
    return _bytes_of(model.buffers()) + _bytes_of(around) + 3 * trained


def saved_bytes(model: nn.Module, expert_parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of what a checkpoint has of a model without its experts: steps too, no gradients."""
    dense = [p for p in _around(model, expert_parameters) if p.requires_grad]
    return dense_bytes(model, expert_parameters) - _bytes_of(dense) + _STEP_BYTES * len(dense)


def _around(model: nn.Module, expert_parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """A model's parameters but the experts'."""
    experts = {id(parameter) for parameter in expert_parameters}
    return [parameter for parameter in model.parameters() if id(parameter) not in experts]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def expert_buffer_bytes(tokens: int, hidden: int, intermediate: int) -> int:
    """What the expert in use takes on top of its record, when all tokens are routed to it.

    Its rows, their gradients and outputs; pre-activations, hidden activations and their gradients.
    """
    return 4 * tokens * (3 * hidden + 6 * intermediate)


def divide(
    budget_bytes: int,
    layouts: Mapping[ExpertKey, RecordLayout],
    *,
    dense: int,
    activations: int,
    has_disk: bool,
    copies: int = 0,
    link: int = 0,
    saved: int = 0,
) -> TrainingMemory:
    """Gives what dense parameters and activations leave of a budget to experts.

    Args:
        dense: bytes of everything but the routed experts, with gradients and moments.
        copies: bytes for weights that are kept in the type of products.
        link: bytes of buffers where a device computes, and holds what is dense.
        saved: bytes of a checkpoint's copy of what is dense there.

    Raises:
        CapacityError: the budget is too small; names the smallest that works.
    """
    # a process whose experts are all elsewhere has an empty slot
    record = max((layout.record_bytes for layout in layouts.values()), default=BLOCK_BYTES)
    # one more record for the gradient of a second micro-batch or of another dtype
    here = link + saved if link else dense + activations
    fixed = here + copies + record
    slots = max(0, budget_bytes - fixed) // record
    num_experts = len(layouts)
    if slots >= num_experts:
        ring, resident = 0 if layouts else 1, list(layouts)
    else:
        fewest = MIN_RING_SLOTS if has_disk else num_experts
        if slots < fewest:
            parts = {"the dense parameters and their states": dense, "activations": activations}
            if link:
                parts = {"the link to the device": link, "a checkpoint's copy": saved}
            raise CapacityError(
                _too_small(budget_bytes, fixed, fewest, record, parts, has_disk),
                smallest_bytes=fixed + fewest * record,
            )
        ring = min(slots, max(MIN_RING_SLOTS + 1, min(slots // 4, RING_BYTES // record)))
        resident = spread(list(layouts), slots - ring)
    return TrainingMemory(
        budget_bytes=budget_bytes,
        dense_bytes=dense,
        activation_bytes=activations,
        link_bytes=link,
        saved_bytes=saved,
        copy_bytes=copies,
        record_bytes=record,
        ring_slots=ring,
        resident=tuple(resident),
        num_experts=num_experts,
    )


def smallest_budget(layouts: Mapping[ExpertKey, RecordLayout], dense: int) -> int:
    """The least that `divide` takes with a disk and without activations."""
    record = max(layout.record_bytes for layout in layouts.values())
    return dense + (MIN_RING_SLOTS + 1) * record


def _too_small(
    budget: int, fixed: int, fewest: int, record: int, parts: Mapping[str, int], has_disk: bool
) -> str:
    hint = "" if has_disk else "; with a storage_dir, experts may live on the disk"
    smallest = fixed + fewest * record
    listed = ", ".join(f"{format_bytes(size)} for {name}" for name, size in parts.items())
    return (
        f"a budget of {format_bytes(budget)} is too small: the smallest that works is "
        f"{format_bytes(smallest, up=True)} ({smallest} bytes): {listed}, and {fewest + 1} records "
        f"of {format_bytes(record)}{hint}"
    )


CPU = torch.device("cpu")


def computing_device(model: nn.Module, expert_parameters: Iterable[nn.Parameter]) -> torch.device:
    """Where a model computes: where everything of it lies but its experts."""
    tensors = _around(model, expert_parameters) or list(model.parameters())
    places = {tensor.device for tensor in tensors if not tensor.is_meta}
    if len(places) > 1:
        names = " and ".join(sorted(map(str, places)))
        raise ValueError(
            f"everything but the experts must be on one device, this model is on {names}"
        )
    return places.pop() if places else CPU


def link_bytes(layouts: Iterable[RecordLayout], place: torch.device) -> int:
    """Pinned host memory of a link, without the records; 0 where the CPU computes."""
    return 0 if place.type == "cpu" else HOST_BUFFERS * buffer_bytes(_largest(layouts))


def open_link(records: RecordStore, place: torch.device) -> DeviceLink | None:
    """The way between records and the device; None where the CPU computes."""
    if place.type == "cpu":
        return None
    section = _largest(record.layout for record in records.experts.values())
    return DeviceLink(open_device(place), section, records.slab)


def held_bytes(
    model: nn.Module, expert_parameters: Iterable[nn.Parameter], place: torch.device
) -> int:
    """Bytes of a model's parameters that are on a device already, the experts' left out."""
    return _bytes_of(p for p in _around(model, expert_parameters) if p.device == place)


def device_budget(device_memory: MemorySize, place: torch.device, held: int) -> int:
    """Bytes that a device's budget stands for; `held` bytes are taken there and count as free."""
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
        dense: bytes of everything else with its states.
        held: bytes of it that are on the device already, and not free.
        updates: that are made there, of one record at a time.

    Raises:
        CapacityError: the budget is too small; names the smallest that works.
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
