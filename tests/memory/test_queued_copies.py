"""Copies that CUDA's runtime is asked for directly, of which it may refuse some."""

import pytest
import torch

from moe_runtime.memory.device.cuda_runtime import queue_copies


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
