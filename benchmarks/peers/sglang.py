"""SGLang. It generates on its own and cannot be given tokens.

On a CPU its wheel computes with torch's operators: its own kernels for processors take AMX and a
build from source. Without an NVIDIA driver it wants a ``libcuda.so.1`` all the same, and a library
of that name with a function `cuPointerGetAttribute` will do, in ``LD_LIBRARY_PATH``. Run by this
project on a CPU (0.5.23), not on a GPU; there compare with ``moe-runtime bench serve`` as well.
Bytes read are those of this process, and another reads the weights. Of Qwen3-MoE, OLMoE and Mixtral
it ignores that the output matrix is the embeddings': every token is then id 0.
"""

import os
from collections.abc import Iterator
from typing import Any

INSTALL = "pip install sglang"
PACKAGES = ("sglang", "torch")
DEVICES = ("cpu", "cuda")


class Peer:
    """Needs ``model`` and ``max_tokens``; its threads are those of ``OMP_NUM_THREADS``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        # It reserves some positions of a sequence, and returns fewer tokens if they are missing.
        most = settings["max_tokens"] + 8
        self._options = {"model_path": settings["model"], "context_length": most}
        self._options |= {"skip_tokenizer_init": True, "disable_radix_cache": True}
        if settings.get("device", "cpu") == "cpu":  # otherwise all memory goes to keys and values
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
            self._options |= {"max_total_tokens": 1024 + most, "max_running_requests": 1}
        import sglang  # type: ignore[import-not-found]

        self._api: Any = sglang

    def load(self) -> None:
        """Load all weights; prefixes are not cached, so that each prompt is read in full."""
        self._engine = self._api.Engine(**self._options)

    def stream(self, ids: list[int], num_new: int) -> Iterator[int]:
        rules = {"temperature": 0.0, "max_new_tokens": num_new, "ignore_eos": True}
        given = 0
        for found in self._engine.generate(input_ids=ids, sampling_params=rules, stream=True):
            tokens = found["output_ids"][given:]  # of all tokens so far
            yield from tokens
            given += len(tokens)

    def close(self) -> None:
        self._engine.shutdown()
