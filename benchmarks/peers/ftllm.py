"""fastllm, a C++ program with a Python interface. It generates on its own and cannot be given
tokens.

Version 1.9.0 needs ``num_experts`` in the configuration, and an output matrix in the file:
``=MODEL`` is a copy that has them where transformers 5 wrote neither.

Variants say where experts lie: in memory (``cpu``) or in the checkpoint's files (``disk``), then
with a cache of half of the memory that it may take.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

INSTALL = "pip install ftllm"
PACKAGES = ("ftllm",)
VARIANTS = ("cpu", "disk")


class Peer:
    """Needs ``model``, ``num_threads``, ``max_tokens`` and ``variant``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from ftllm import llm  # type: ignore[import-not-found]

        self._api: Any = llm
        self._settings = settings
        llm.set_cpu_threads(settings["num_threads"])
        llm.set_device_map("cpu")
        llm.set_device_map(settings["variant"] or "cpu", is_moe=True)
        if settings["variant"] == "disk" and settings.get("cap_bytes"):
            llm.fastllm_lib.set_moe_cpu_cache(settings["cap_bytes"] // 2)
        self._model: Any = None

    def load(self) -> None:
        """Load all weights, or all but the experts."""
        # On CPUs it only computes in fp16.
        self._model = self._api.model(self._settings["model"], dtype="float16")

    def stream(self, ids: list[int], num_new: int) -> Iterator[int]:
        library, number = self._api.fastllm_lib, self._model.model
        given = (ctypes.c_int * len(ids))(*ids)
        nothing = (ctypes.c_int * 1)()
        handle = library.launch_response_llm_model(
            *(number, len(ids), given, num_new, num_new),  # minimum and maximum tokens
            *(False, 1.0, 1, 1.0, 1.0, False, 0, nothing),  # greedy, without penalties
        )
        while (token := library.fetch_response_llm_model(number, handle)) > -1:
            yield token

    def close(self) -> None:
        self._model.release_memory()
