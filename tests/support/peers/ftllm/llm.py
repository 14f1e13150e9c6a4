"""Stands in for fastllm's Python face, with the library that it calls through ctypes."""

from typing import Any

from recorded_calls import continuation


def set_cpu_threads(count: int) -> None: ...


def set_device_map(device: str, is_moe: bool = False) -> None: ...


class Library:
    """Greedy generation; a handle for each request, and -1 after its last token."""

    def __init__(self) -> None:
        self._left: list[int] = []

    def set_moe_cpu_cache(self, num_bytes: int) -> None: ...

    def launch_response_llm_model(self, model: int, length: int, ids: Any, *rest: Any) -> int:
        most, _, samples, *_ = rest
        assert length == len(ids)
        assert not samples
        self._left = continuation(list(ids), most)
        return 3

    def fetch_response_llm_model(self, model: int, handle: int) -> int:
        assert (model, handle) == (7, 3)
        return self._left.pop(0) if self._left else -1


fastllm_lib = Library()


class model:
    def __init__(self, path: str, dtype: str) -> None:
        self.model = 7

    def release_memory(self) -> None: ...
