"""The systems under test behind one small interface; each runs in a worker process of its own.

Heavy packages are imported when a system is made, so that a run holds only what it needs; the
optional ones by name, so that the type checker does not ask for them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from harness.plan import OURS_INT8, OURS_PACKED
from harness.processes import RunSpec

SYSTEM_NAMES = ("ours", "transformers", "accelerate", "llama.cpp")
# Systems that run only when they are named.
VARIANTS = (OURS_PACKED, OURS_INT8, "transformers:eager", "transformers:grouped_mm")
UBATCH_TOKENS = 512
# What accelerate must leave free of a cap: interpreter and libraries, one layer's experts twice
# (as read and as fused), activations.
ACCELERATE_RESERVE_BYTES = 5 << 29


class System(Protocol):
    """A language model that holds one sequence at a time."""

    def load(self) -> None:
        """Loads the weights, as far as the system loads them at all before they are used."""
        ...

    def prefill(self, ids: Sequence[int]) -> int:
        """Forgets everything, reads `ids` in one go, returns the likeliest next token."""
        ...

    def step(self, token: int) -> int:
        """Appends one token, returns the likeliest next."""
        ...

    def counters(self) -> dict[str, Any]:
        """The system's own counters so far; empty when it keeps none."""
        ...

    def close(self) -> None:
        """Frees what the system holds."""
        ...


def make_system(spec: RunSpec) -> System:
    """The system that `spec.system` names; imports what it needs.

    Raises:
        ValueError: no such system.
    """
    if spec.system.partition(":")[0] == "transformers":
        return InMemoryTransformers(spec, spec.system.partition(":")[2] or None)
    systems = {
        "ours": Ours,
        OURS_PACKED: Ours,
        OURS_INT8: Ours,
        "accelerate": AccelerateOffload,
        "llama.cpp": LlamaCpp,
    }
    if spec.system not in systems:
        raise ValueError(f"unknown system {spec.system!r}")
    return systems[spec.system](spec)


class TorchModel:
    """What the three systems that are `transformers` models have in common."""

    def __init__(self, spec: RunSpec) -> None:
        import torch
        import transformers

        # transformers imports lazily; forced here, so that it counts as imports, not as loading.
        importlib.import_module("transformers.models.olmoe.modeling_olmoe")
        self._model_class: Any = transformers.AutoModelForCausalLM
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(spec.num_threads)
        self._torch = torch
        self._spec = spec
        self._model: Any = None
        self._cache: dict[str, Any] = {}

    def prefill(self, ids: Sequence[int]) -> int:
        self._cache = {}
        return self._forward(list(ids))

    def step(self, token: int) -> int:
        return self._forward([token])

    def counters(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._cache = {}
        self._model = None

    def _forward(self, ids: list[int]) -> int:
        with self._torch.inference_mode():
            output = self._model(
                self._torch.tensor([ids]), use_cache=True, logits_to_keep=1, **self._cache
            )
        # of transformers from 5.24 on, and before
        names = output.keys() & {"cache", "past_key_values"}
        self._cache = {name: output[name] for name in names}
        return int(output.logits[0, -1].argmax())


class InMemoryTransformers(TorchModel):
    """`transformers` with all weights in memory."""

    def __init__(self, spec: RunSpec, experts_implementation: str | None) -> None:
        super().__init__(spec)
        self._options = {"experts_implementation": experts_implementation}
        if experts_implementation is None:
            self._options = {}

    def load(self) -> None:
        self._model = self._model_class.from_pretrained(
            self._spec.checkpoint, dtype=self._torch.bfloat16, **self._options
        ).eval()


class AccelerateOffload(TorchModel):
    """`transformers` with accelerate: modules that exceed the cap are left on disk."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        importlib.import_module("accelerate")

    def load(self) -> None:
        if self._spec.cap_bytes is None:
            raise ValueError("accelerate's disk offload needs a memory cap to offload under")
        self._model = self._model_class.from_pretrained(
            self._spec.checkpoint,
            dtype=self._torch.bfloat16,
            device_map="auto",
            max_memory={"cpu": max(0, self._spec.cap_bytes - ACCELERATE_RESERVE_BYTES)},
            offload_folder=self._spec.offload_folder,
        ).eval()


class Ours(TorchModel):
    """`moe_runtime`: the `transformers` model with experts streamed from the checkpoint."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        import moe_runtime

        self._load = moe_runtime.load

    def load(self) -> None:
        self._model = self._load(
            self._spec.checkpoint,
            device="cpu",
            dtype="auto",
            host_memory=self._spec.host_memory,
            policy="lru",
            activations="int8" if self._spec.system == OURS_INT8 else "exact",
            trace=self._spec.trace,
            max_tokens=len(self._spec.prompt_ids) + len(self._spec.decode_ids) + 1,
        )

    def counters(self) -> dict[str, Any]:
        return dataclasses.asdict(self._model.moe.stats())

    def close(self) -> None:
        self._model.moe.close()
        super().close()


class LlamaCpp:
    """llama.cpp through `llama-cpp-python`, weights mapped from a bf16 GGUF file."""

    def __init__(self, spec: RunSpec) -> None:
        import numpy

        self._api = importlib.import_module("llama_cpp")
        self._numpy = numpy
        self._spec = spec
        self._vocab_size = 0
        self._model: Any = None
        self._context: Any = None

    def load(self) -> None:
        api, spec = self._api, self._spec
        if not Path(spec.gguf).is_file():
            raise FileNotFoundError(f"no GGUF file at {spec.gguf}")
        api.llama_backend_init()
        model_options = api.llama_model_default_params()
        model_options.use_mmap = True
        model_options.n_gpu_layers = 0
        # copies of quantised weights in another order, beside the mapped file: none fit under a cap
        model_options.use_extra_bufts = spec.cap_bytes is None
        self._model = api.llama_model_load_from_file(spec.gguf.encode(), model_options)
        options = api.llama_context_default_params()
        options.n_ctx = len(spec.prompt_ids) + len(spec.decode_ids) + 1
        options.n_batch = options.n_ubatch = UBATCH_TOKENS
        options.n_threads = options.n_threads_batch = spec.num_threads
        self._context = api.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {spec.gguf}")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))

    def prefill(self, ids: Sequence[int]) -> int:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        for start in range(0, len(ids), UBATCH_TOKENS):
            self._decode(ids[start : start + UBATCH_TOKENS])
        return self._likeliest()

    def step(self, token: int) -> int:
        self._decode([token])
        return self._likeliest()

    def counters(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _decode(self, ids: Sequence[int]) -> None:
        tokens = (self._api.llama_token * len(ids))(*ids)
        status = self._api.llama_decode(
            self._context, self._api.llama_batch_get_one(tokens, len(ids))
        )
        if status != 0:
            raise RuntimeError(f"llama_decode failed with status {status}")

    def _likeliest(self) -> int:
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return int(self._numpy.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
