"""Division of the budgets of the host and of the device that computes."""

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
from moe_runtime.training.offload.compute_copies import (
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
"""Of slots between disk and computation, enough to keep a disk busy."""

DEFAULT_ACTIVATION_SHARE = 0.25
"""Share of a budget for activations."""

SPARE_BYTES = 32 * 2**20

_STEP_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """A division of host memory.

    Attributes:
        dense_bytes: weights, gradients and moments of everything but the routed experts.
        activation_bytes: for the forward and backward pass.
        link_bytes: buffers of the link to a device that computes, which then holds dense parameters
            and activations; 0 for the CPU.
        saved_bytes: for a checkpoint's copy of a device's dense parameters.
        copy_bytes: for weights that are kept in the dtype of products.
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
    """A division of memory for frozen experts, which stay in the checkpoint's files.

    Attributes:
        host: if a device computes, only for slots and a checkpoint's copy.
        device: of the device that computes; None for the CPU.
    """

    host: MemoryPlan
    device: MemoryPlan | None = None


def dense_bytes(model: nn.Module, expert_parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of all but the experts: parameters, buffers, gradients and moments."""
    around = _around(model, expert_parameters)
    trained = _bytes_of(p for p in around if p.requires_grad)
    return _bytes_of(model.buffers()) + _bytes_of(around) + 3 * trained


def saved_bytes(model: nn.Module, expert_parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of a checkpoint without experts: as `dense_bytes`, with steps, without gradients."""
    dense = [p for p in _around(model, expert_parameters) if p.requires_grad]
    return dense_bytes(model, expert_parameters) - _bytes_of(dense) + _STEP_BYTES * len(dense)


def _around(model: nn.Module, expert_parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    experts = {id(parameter) for parameter in expert_parameters}
    return [parameter for parameter in model.parameters() if id(parameter) not in experts]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def expert_buffer_bytes(tokens: int, hidden: int, intermediate: int) -> int:
    """Bytes of the expert in use besides its record, when all tokens are routed to it.

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
    """Divides a budget; experts get the rest. Arguments are bytes, as of `TrainingMemory`.

    Raises:
        CapacityError: the budget is too small; names the smallest that works.
    """
    # a process without experts has an empty slot
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
            listed = ", ".join(f"{format_bytes(size)} for {name}" for name, size in parts.items())
            hint = "" if has_disk else "; with a storage_dir, experts may live on the disk"
            smallest = fixed + fewest * record
            raise CapacityError(
                f"a budget of {format_bytes(budget_bytes)} is too small: the smallest that works "
                f"is {format_bytes(smallest, up=True)} ({smallest} bytes): {listed}, and "
                f"{fewest + 1} records of {format_bytes(record)}{hint}",
                smallest_bytes=smallest,
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


CPU = torch.device("cpu")


def computing_device(model: nn.Module, expert_parameters: Iterable[nn.Parameter]) -> torch.device:
    """The one device of all tensors of a model but its experts."""
    tensors = _around(model, expert_parameters) or list(model.parameters())
    places = {tensor.device for tensor in tensors if not tensor.is_meta}
    if len(places) > 1:
        names = " and ".join(sorted(map(str, places)))
        raise ValueError(
            f"everything but the experts must be on one device, this model is on {names}"
        )
    return places.pop() if places else CPU


def link_bytes(layouts: Iterable[RecordLayout], place: torch.device) -> int:
    """Pinned host memory of a link's buffers; 0 for the CPU."""
    return 0 if place.type == "cpu" else HOST_BUFFERS * buffer_bytes(_largest(layouts))


def open_link(records: RecordStore, place: torch.device) -> DeviceLink | None:
    """The link between records and the device; None for the CPU."""
    if place.type == "cpu":
        return None
    section = _largest(record.layout for record in records.experts.values())
    return DeviceLink(open_device(place), section, records.slab)


def held_bytes(
    model: nn.Module, expert_parameters: Iterable[nn.Parameter], place: torch.device
) -> int:
    """Bytes of a model's parameters on a device, without the experts."""
    return _bytes_of(p for p in _around(model, expert_parameters) if p.device == place)


def device_budget(device_memory: MemorySize, place: torch.device, held: int) -> int:
    """Bytes of a device's budget; `held` bytes are allocated there already, and count as free."""
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
    """Bytes of a device's budget for activations, and for experts' weights that stay there.

    Args:
        device_memory: the budget; "auto" keeps no weights.
        dense: bytes of everything else with its states.
        held: bytes of it that are on the device already.
        updates: made on the device, one record at a time.

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
