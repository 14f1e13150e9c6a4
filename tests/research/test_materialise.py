"""Hecate's two algorithms: exact where they are, and their promises on random loads."""

import random

import pytest

from moe_runtime.research.hecate import calibrate, plan_copies, reshard


def plan(loads: list[float], owners: list[int], **options: int) -> list[list[int]]:
    given = {"num_devices": 4, "devices_per_node": 2, "max_experts": 3, "slots_per_device": 2}
    return plan_copies(loads, owners, **{**given, **options})


def test_with_room_for_all_every_device_gets_the_hottest():
    copies = plan([5, 1, 9, 7], [0, 1, 2, 3], max_experts=2, slots_per_device=3)
    assert copies == [[2, 3], [2, 3], [3], [2]]


def test_shares_follow_the_loads():
    """Eight slots for loads 6 : 1 : 1; the first can use three devices, the others get the rest."""
    copies = plan([6, 1, 1, 0], [0, 1, 2, 3])
    counts = [sum(expert in held for held in copies) for expert in range(4)]
    assert counts == [3, 3, 2, 0]


def test_copies_go_to_other_nodes_first():
    copies = plan([9, 1], [0, 1], max_experts=2, slots_per_device=1)
    assert copies[2][:1] == [0]


@pytest.mark.parametrize("seed", range(10))
def test_copies_keep_to_the_hottest_and_to_the_room(seed):
    draw = random.Random(seed)
    num_devices, num_experts = draw.choice([2, 4, 8]), draw.randint(1, 20)
    loads = [draw.random() ** 4 for _ in range(num_experts)]
    owners = [draw.randrange(num_devices) for _ in range(num_experts)]
    hot, slots = draw.randint(0, 12), draw.randint(0, 5)
    copies = plan_copies(
        loads,
        owners,
        num_devices=num_devices,
        devices_per_node=2,
        max_experts=hot,
        slots_per_device=slots,
    )
    hottest = set(sorted(range(num_experts), key=lambda e: -loads[e])[:hot])
    for device, held in enumerate(copies):
        assert len(held) <= slots or hot <= slots
        assert len(set(held)) == len(held)
        assert all(owners[expert] != device and expert in hottest for expert in held)


@pytest.mark.parametrize("seed", range(10))
def test_owners_are_equal_in_number_and_balanced(seed):
    draw = random.Random(seed)
    loads = [[draw.random() ** 4 for _ in range(16)] for _ in range(3)]
    owners = reshard(loads, num_devices=4, devices_per_node=2, num_copied=2)
    everywhere = [device for owner in owners for device in owner]
    assert [everywhere.count(device) for device in range(4)] == [12] * 4
    # In the layer that comes first, no device runs out of slots: greedy in descending order then
    # exceeds the mean by less than one item.
    first = max(range(3), key=lambda layer: max(loads[layer]))
    rest = sorted(range(16), key=lambda e: -loads[first][e])[2:]
    carried = [sum(loads[first][e] for e in rest if owners[first][e] == d) for d in range(4)]
    assert max(carried) <= sum(carried) / 4 + max(loads[first][e] for e in rest)


def test_bad_numbers():
    with pytest.raises(ValueError, match="5 experts do not divide by 2 devices"):
        reshard([[1.0] * 5], num_devices=2, devices_per_node=1, num_copied=0)
    with pytest.raises(ValueError, match="3 devices are not a whole number of nodes of 2"):
        plan([1.0], [0], num_devices=3)


def calibrated(
    loads: list[float], copies: list[list[int]], *, token_s: float = 1.0
) -> list[list[int]]:
    """Four experts, each owned by the device of its number; an expert costs as much as a token."""
    return calibrate(
        loads,
        [0, 1, 2, 3],
        copies,
        devices_per_node=2,
        slots_per_device=2,
        token_s=token_s,
        expert_s=1.0,
    )


def test_calibration_adds_copies_that_pay_and_fit():
    nothing: list[list[int]] = [[], [], [], []]
    # Expert 3 is hot and was not copied; split over all devices it costs three sends.
    assert calibrated([0, 0, 0, 100], nothing) == [[3], [3], [3], []]
    assert calibrated([5, 5, 5, 5], nothing) == nothing
    # Relieves the device of 3 tokens, and costs 3 experts.
    assert calibrated([0, 0, 0, 4], nothing) == nothing
    assert calibrated([0, 0, 0, 100], nothing, token_s=0.01) == nothing
    assert calibrated([0, 0, 0, 100], [[1, 2], [2, 3], [0, 1], [0, 1]]) == nothing


@pytest.mark.parametrize("seed", range(10))
def test_calibration_is_the_best_of_its_plans(seed):
    """Against loads counted token by token, for every number of hottest experts."""
    draw = random.Random(seed)
    num_devices, num_experts = 4, draw.randint(1, 12)
    loads = [float(draw.randrange(50)) for _ in range(num_experts)]
    owners = [draw.randrange(num_devices) for _ in range(num_experts)]
    given = {"num_devices": num_devices, "devices_per_node": 2, "slots_per_device": 2}
    copies = plan_copies([1.0] * num_experts, owners, max_experts=1, **given)
    room = 3 - max(map(len, copies))

    def seconds(extra: list[list[int]]) -> float:
        busy = [0.0] * num_devices
        for expert, load in enumerate(loads):
            holders = {owners[expert]} | {
                device
                for device in range(num_devices)
                if expert in copies[device] or expert in extra[device]
            }
            for device in holders:
                busy[device] += load / len(holders)
        sent = [sum(owners[e] == d for held in extra for e in held) for d in range(num_devices)]
        return 1.0 * max(busy) + 2.0 * max(*sent, *map(len, extra))

    plans = [[[] for _ in range(num_devices)]]
    for number in range(1, num_experts + 1):
        plan = plan_copies(
            loads,
            owners,
            num_devices=num_devices,
            devices_per_node=2,
            max_experts=number,
            slots_per_device=room,
        )
        plans.append([[e for e in plan[d] if e not in copies[d]] for d in range(num_devices)])
    found = calibrate(
        loads, owners, copies, devices_per_node=2, slots_per_device=3, token_s=1.0, expert_s=2.0
    )
    assert seconds(found) == pytest.approx(min(map(seconds, plans)))
