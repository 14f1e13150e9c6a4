"""Which experts to copy where for one iteration, and which device owns them (Hecate, FSSDP).

Rounding of shares is not specified in the paper; here it is by largest remainder, and what an
expert cannot use goes to the next.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan_copies(
    loads_E: Sequence[float],
    owner_E: Sequence[int],
    *,
    num_devices: int,
    devices_per_node: int,
    max_experts: int,
    slots_per_device: int,
) -> list[list[int]]:
    """Copies for the next iteration (Hecate's algorithm 1).

    As many of the hottest experts as can be copied behind the computation before the layer
    (`max_experts`), within the copies that each device has room for.

    Returns:
        For each device, the experts to copy to it, hottest first; never one that it owns.

    Raises:
        ValueError: Numbers that do not fit each other.
    """
    num_experts = len(loads_E)
    if len(owner_E) != num_experts or not all(0 <= o < num_devices for o in owner_E):
        raise ValueError(f"expected an owner among {num_devices} devices for each expert")
    _check_nodes(num_devices, devices_per_node)
    num_hot = min(max_experts, num_experts)
    room = min(slots_per_device, num_hot)
    hot = _by_load(loads_E)[:num_hot]
    if num_hot <= room:
        return [[e for e in hot if owner_E[e] != device] for device in range(num_devices)]
    copies: list[list[int]] = [[] for _ in range(num_devices)]
    wanted = _shares([loads_E[e] for e in hot], num_devices * room, num_devices - 1)
    for expert, number in zip(hot, wanted, strict=True):
        for _ in range(number):
            device = _best_device(expert, owner_E[expert], copies, room, devices_per_node)
            if device is None:
                break
            copies[device].append(expert)
    return copies


def calibrate(
    loads_E: Sequence[float],
    owner_E: Sequence[int],
    copies: Sequence[Sequence[int]],
    *,
    devices_per_node: int,
    slots_per_device: int,
    token_s: float,
    expert_s: float,
) -> list[list[int]]:
    """More copies for this iteration, now that its loads are known (Hecate's calibration).

    Algorithm 1 again, with the real loads and the memory that is left, for every number of hottest
    experts. The best plan is taken if the computation that the busiest device is relieved of takes
    longer than sending the copies, which nothing hides.

    Args:
        copies: What is copied already, for each device.
        slots_per_device: Copies that a device has room for, those in `copies` included.
        token_s: Seconds to compute one token, in all passes.
        expert_s: Seconds to copy one expert and to bring its gradient back.

    Returns:
        For each device, more experts to copy to it; empty lists where nothing is gained.
    """
    num_devices = len(copies)
    holders = _holders(owner_E, copies)
    before = max(_device_loads(loads_E, holders, num_devices))
    room = slots_per_device - max((len(experts) for experts in copies), default=0)
    best: list[list[int]] = [[] for _ in range(num_devices)]
    best_s = 0.0
    for number in range(1, len(loads_E) + 1 if room > 0 else 0):
        plan = plan_copies(
            loads_E,
            owner_E,
            num_devices=num_devices,
            devices_per_node=devices_per_node,
            max_experts=number,
            slots_per_device=room,
        )
        extra = [
            [expert for expert in wanted if device not in holders[expert]]
            for device, wanted in enumerate(plan)
        ]
        after = max(_device_loads(loads_E, _holders(owner_E, copies, extra), num_devices))
        sent = [
            sum(owner_E[e] == device for some in extra for e in some)
            for device in range(num_devices)
        ]
        cost_s = expert_s * max(*sent, *map(len, extra))
        gain_s = token_s * (before - after) - cost_s
        if gain_s > best_s:
            best, best_s = extra, gain_s
    return best


def _holders(owner_E: Sequence[int], *plans: Sequence[Sequence[int]]) -> list[set[int]]:
    """Devices that hold each expert: its owner, and those that plans copy it to."""
    holders = [{owner} for owner in owner_E]
    for plan in plans:
        for device, experts in enumerate(plan):
            for expert in experts:
                holders[expert].add(device)
    return holders


def _device_loads(
    loads_E: Sequence[float], holders: Sequence[set[int]], num_devices: int
) -> list[float]:
    """Tokens that each device computes when those of an expert are split over its holders."""
    loads = [0.0] * num_devices
    for load, devices in zip(loads_E, holders, strict=True):
        for device in devices:
            loads[device] += load / len(devices)
    return loads


def reshard(
    loads_LE: Sequence[Sequence[float]], *, num_devices: int, devices_per_node: int, num_copied: int
) -> list[list[int]]:
    """`owner[layer][expert]`: the same number of experts for every device (Hecate's algorithm 2).

    The hottest `num_copied` experts of a layer are copied anyway, so their owners do not matter;
    the others are balanced within their layer.
    """
    _check_nodes(num_devices, devices_per_node)
    total = sum(len(loads_E) for loads_E in loads_LE)
    if total % num_devices:
        raise ValueError(f"{total} experts do not divide by {num_devices} devices")
    free = [total // num_devices] * num_devices
    owners = [[-1] * len(loads_E) for loads_E in loads_LE]
    layers = sorted(range(len(loads_LE)), key=lambda layer: (-max(loads_LE[layer]), layer))
    for layer in layers:
        loads_E = loads_LE[layer]
        carried = [0.0] * num_devices
        for expert in _by_load(loads_E)[num_copied:]:
            device = _least_loaded(carried, free, devices_per_node)
            owners[layer][expert] = device
            carried[device] += loads_E[expert]
            free[device] -= 1
    for owner_E in owners:
        for expert, device in enumerate(owner_E):
            if device < 0:
                owner_E[expert] = max(range(num_devices), key=lambda d: (free[d], -d))
                free[owner_E[expert]] -= 1
    return owners


def _check_nodes(num_devices: int, devices_per_node: int) -> None:
    if num_devices < 1 or devices_per_node < 1 or num_devices % devices_per_node:
        raise ValueError(
            f"{num_devices} devices are no whole number of nodes of {devices_per_node}"
        )


def _by_load(loads_E: Sequence[float]) -> list[int]:
    return sorted(range(len(loads_E)), key=lambda expert: (-loads_E[expert], expert))


def _shares(loads: Sequence[float], total: int, most: int) -> list[int]:
    """`total` in proportion to the loads by largest remainder, none above `most`."""
    sum_loads = sum(loads)
    exact = [total * load / sum_loads if sum_loads > 0 else total / len(loads) for load in loads]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(loads)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    spare = 0
    for i, share in enumerate(shares):
        shares[i] = min(share + spare, most)
        spare = share + spare - shares[i]
    return shares


def _best_device(
    expert: int, owner: int, copies: Sequence[Sequence[int]], room: int, devices_per_node: int
) -> int | None:
    """A device without the expert: in a node without it if there is one, with most room."""
    holds = [device == owner or expert in held for device, held in enumerate(copies)]
    nodes: list[tuple[bool, int, int]] = []
    for first in range(0, len(copies), devices_per_node):
        devices = range(first, first + devices_per_node)
        usable = [d for d in devices if not holds[d] and len(copies[d]) < room]
        if usable:
            free = sum(room - len(copies[d]) for d in devices)
            nodes.append((any(holds[d] for d in devices), -free, first))
    if not nodes:
        return None
    first = min(nodes)[2]
    devices = range(first, first + devices_per_node)
    usable = [d for d in devices if not holds[d] and len(copies[d]) < room]
    return min(usable, key=lambda d: (len(copies[d]), d))


def _least_loaded(carried: Sequence[float], free: Sequence[int], devices_per_node: int) -> int:
    """The least loaded device with a free slot, of the least loaded node with one."""
    nodes: list[tuple[float, int, int]] = []
    for first in range(0, len(carried), devices_per_node):
        devices = range(first, first + devices_per_node)
        num_free = sum(free[d] for d in devices)
        if num_free:
            nodes.append((sum(carried[d] for d in devices), num_free, first))
    first = min(nodes)[2]
    devices = [d for d in range(first, first + devices_per_node) if free[d]]
    return min(devices, key=lambda d: (carried[d], free[d], d))
