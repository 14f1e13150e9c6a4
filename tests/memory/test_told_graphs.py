"""Recorded graphs that tell the host something in the middle of each replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice

from moe_runtime.memory.device.cuda_device import CudaDevice
from moe_runtime.memory.device.device import NOT_TOLD


def check_told(device: Any, place: str) -> None:
    numbers = torch.tensor([[3, -1], [0, 7]], device=place)
    values = torch.ones(2, 5, dtype=torch.bfloat16, device=place)
    device.compute_here()
    with device.record() as recorder:
        numbers.add_(1)
        values.mul_(2)
        told = recorder.tell(numbers, values)
        later = values * 3
        first = recorder.cut()
        later.add_(1)
        second = recorder.end()
    assert numbers.tolist() == [[3, -1], [0, 7]]  # nothing is computed
    for step in range(1, 4):
        told.settle()
        told.forget()
        if step == 2:  # what strikes before a replay leaves nobody waiting
            told.settle()
            told.forget()
        assert not told.query()
        first.replay()
        second.replay()
        told.synchronize()
        assert told.query()
        assert told.numbers.tolist() == [[3 + step, step - 1], [step, 7 + step]]
        assert told.values[0].eq(2**step).all()
        assert later.eq(3 * 2**step + 1).all()
    for _ in range(3):  # and nobody looks
        told.settle()
        told.forget()
        first.replay()
    told.synchronize()
    assert told.numbers.tolist() == [[9, 5], [6, 13]]
    assert (told.numbers > NOT_TOLD).all()


def test_what_a_graph_tells_is_known_behind_its_event() -> None:
    check_told(EmulatedDevice(), "cpu")


@pytest.mark.gpu
def test_a_gpu_tells_the_host_from_within_a_graph() -> None:
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    check_told(device, "cuda")
    with device.record() as recorder:
        told = recorder.tell(torch.zeros(3, dtype=torch.int32, device="cuda"))
        graph = recorder.end()
    told.forget()
    with pytest.raises(RuntimeError, match="did not tell"):
        told.synchronize()
    graph.replay()
    told.synchronize()
