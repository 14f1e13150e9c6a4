"""What CUDA's runtime is asked for directly, and may refuse."""

from typing import Any

import pytest
import torch

from moe_runtime.memory.device.cuda_device import is_mapped, queue_copies


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


def test_a_copy_that_cuda_refuses_is_told_and_leaves_no_error_to_what_is_launched_next() -> None:
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
def test_kernels_read_host_memory_where_it_has_one_address_for_both(offset: int | None) -> None:
    runtime = MappingRuntime(offset)
    assert is_mapped(runtime, torch.zeros(8, dtype=torch.uint8)) == (offset == 0)
    assert runtime.last_error == 0
