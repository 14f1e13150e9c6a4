"""What CUDA's runtime is asked for directly, and may refuse."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from emulated_device import EmulatedDevice

from moe_runtime.memory.device.cuda_device import NOT_TOLD, CudaDevice, is_mapped, queue_copies


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


def device_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device as far as recordings need it, without a driver."""
    device: Any = object.__new__(CudaDevice)
    device.place = torch.device("cuda", 0)
    device._pool = device._recording = device._telling = device._replayed = None
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return device


def test_recordings_share_the_memory_of_their_graphs(monkeypatch):
    """Up to seventeen of them, of which one is replayed at a time; the device holds it."""
    made = list[Any]()

    def make() -> Any:
        made.append(SimpleNamespace(id=(0, len(made) + 1)))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "MemPool", make)
    device = device_of(monkeypatch)
    pools = [device.record()._pool for _ in range(3)]
    assert pools == [(0, 1)] * 3
    assert device._pool is made[0]


@pytest.mark.parametrize("num_cuts", [0, 1])
def test_a_recording_that_cannot_begin_leaves_the_thread_as_it_was(monkeypatch, num_cuts):
    """At first, or behind a cut."""
    device, graph, generator = device_of(monkeypatch), Mock(), Mock()
    device._pool, left = Mock(), list[object]()
    graph.capture_begin.side_effect = [*[None] * num_cuts, RuntimeError("use_count > 0")]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    within = ExitStack()
    within.callback(left.append, "stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: within)
    with pytest.raises(RuntimeError, match="use_count"), device.record() as recorder:
        recorder.cut()
    assert left == ["stream"]
    generator.graphsafe_set_state.assert_called_once_with(generator.clone_state())


def test_replays_of_several_streams_run_one_behind_another(monkeypatch):
    device = device_of(monkeypatch)
    device._computing = {number: Mock() for number in (3, 4)}
    device.compute_here = iter((3, 3, 4, 3)).__next__
    for _ in range(4):
        with device.replaying():
            pass
    ends = {number: stream.record_event() for number, stream in device._computing.items()}
    waited = {n: stream.wait_event.call_args_list for n, stream in device._computing.items()}
    assert waited == {3: [call(ends[4])], 4: [call(ends[3])]}


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
    with pytest.raises(RuntimeError, match="did not tell"):
        told.synchronize()
    graph.replay()
    told.synchronize()
