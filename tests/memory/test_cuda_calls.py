"""What CUDA's runtime is asked for directly, and may refuse."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emulated_device import EmulatedDevice

from moe_runtime.memory.device import cuda_device
from moe_runtime.memory.device.cuda_device import (
    NOT_TOLD,
    CudaDevice,
    CudaTold,
    is_mapped,
    queue_copies,
)


class RefusingRuntime:
    """Copies at once, refuses one copy, and keeps the error until it is asked for, as CUDA does."""

    def __init__(self, refused: int) -> None:
        self.calls: list[tuple[int, int, int, int, int]] = []
        self.last_error = 0
        self._refused = refused

    def cudaMemcpyAsync(self, to: int, source: int, size: int, way: int, stream: int) -> int:
        self.calls.append((to, source, size, way, stream))
        if len(self.calls) == self._refused:
            self.last_error = 2
            return 2
        return 0

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error


def test_a_copy_that_cuda_refuses_is_told_and_leaves_no_error_to_what_is_launched_next():
    sources, targets = (torch.zeros(3, 5, dtype=torch.uint8) for _ in range(2))
    parts, runtime = [*zip(sources, targets, strict=True)], RefusingRuntime(2)
    with pytest.raises(RuntimeError, match="cudaMemcpyAsync failed with error 2"):
        queue_copies(runtime, parts, 7)
    assert runtime.last_error == 0
    assert len(runtime.calls) == 2
    queue_copies(runtime, parts[2:], 7)
    places = targets[2].data_ptr(), sources[2].data_ptr()
    assert runtime.calls[-1] == (*places, 5, 4, 7)  # bytes; "any way"; the stream


class MappingRuntime(RefusingRuntime):
    """Has host memory at some address on the device, or refuses to say."""

    def __init__(self, offset: int | None) -> None:
        super().__init__(0)
        self._offset = offset

    def cudaHostGetDevicePointer(self, found: Any, address: Any, flags: int) -> int:
        assert flags == 0
        if self._offset is None:
            self.last_error = 1
            return 1
        found._obj.value = address.value + self._offset
        return 0


@pytest.mark.parametrize("offset", [0, 4096, None])
def test_kernels_read_host_memory_where_it_has_one_address_for_both(offset):
    runtime = MappingRuntime(offset)
    assert is_mapped(runtime, torch.zeros(8, dtype=torch.uint8)) == (offset == 0)
    assert runtime.last_error == 0


@pytest.mark.gpu
def test_a_gpu_records_again_when_all_recordings_are_gone():
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    numbers = torch.zeros(1000, device="cuda")
    for step in range(3):
        with device.record() as recorder:
            numbers += torch.ones_like(numbers)
            graph = recorder.end()
        graph.replay()
        assert numbers.eq(step + 1).all()
        del graph


@pytest.mark.gpu
def test_replays_on_two_streams_of_a_gpu_do_not_share_memory_at_once():
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    totals = torch.zeros(2, device="cuda")
    device.compute_here()
    parts = []
    for value in range(2):
        with device.record() as recorder:
            wide = torch.full((2**24,), value + 1.0, device="cuda")
            first = recorder.cut()
            totals[value] += wide.amin() + wide.amax()
            parts.append((first, recorder.end()))
        del wide
    streams = [torch.cuda.Stream() for _ in parts]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, graphs in zip(streams, parts, strict=True):
            with torch.cuda.stream(stream), device.replaying():
                for graph in graphs:
                    graph.replay()
    torch.cuda.synchronize()
    assert totals.tolist() == [100.0, 200.0]


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


@pytest.mark.parametrize("in_order", [True, False])
def test_values_are_waited_for_where_loads_may_overtake_each_other(monkeypatch, in_order):
    told, stream = CudaTold.__new__(CudaTold), Mock()
    told.numbers, told.values, told._stream = torch.zeros(1, dtype=torch.long), [], stream
    told._looked_at = told.numbers.numpy()
    monkeypatch.setattr(cuda_device, "LOADS_IN_ORDER", in_order)
    told.synchronize()
    stream.synchronize.assert_not_called()
    told.values = [torch.ones(1)]
    told.synchronize()
    assert stream.synchronize.called == (not in_order)


def test_what_a_graph_tells_is_known_behind_its_event():
    check_told(EmulatedDevice(), "cpu")


@pytest.mark.gpu
def test_a_gpu_tells_the_host_from_within_a_graph():
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    check_told(device, "cuda")
    with device.record() as recorder:
        told = recorder.tell(torch.zeros(3, dtype=torch.int32, device="cuda"))
        graph = recorder.end()
    told.forget()
    with pytest.raises(RuntimeError, match="without its numbers"):
        told.synchronize()
    graph.replay()
    told.synchronize()
