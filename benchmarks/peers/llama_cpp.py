"""llama.cpp through its Python wheel. MODEL must be a GGUF file, which is mapped."""

from importlib import import_module
from typing import Any

INSTALL = "pip install llama-cpp-python"
PACKAGES = ("llama-cpp-python",)
DEVICES = ("cpu", "cuda")


class Peer:
    """Needs ``model``, ``num_threads`` and ``max_tokens``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._api, self._numpy = map(import_module, ("llama_cpp", "numpy"))
        self._settings, self._on_gpu = settings, settings.get("device", "cpu") != "cpu"
        if not settings["model"].endswith(".gguf"):
            raise ValueError(f"llama.cpp reads GGUF files, and {settings['model']} is none")
        if self._on_gpu and not self._api.llama_supports_gpu_offload():
            raise ValueError("this llama.cpp was built without a GPU (CMAKE_ARGS=-DGGML_CUDA=on)")

    def load(self) -> None:
        """Map the file; a GPU gets all layers, or those that fit in ``device_memory`` bytes."""
        api, settings, budget = self._api, self._settings, self._settings.get("device_memory")
        api.llama_backend_init()
        path, of_model = settings["model"].encode(), api.llama_model_default_params()
        of_model.use_mmap, of_model.n_gpu_layers = True, 0
        self._model = api.llama_model_load_from_file(path, of_model)
        if self._on_gpu and self._model:
            size, count = api.llama_model_size(self._model), api.llama_model_n_layer(self._model)
            of_model.n_gpu_layers = budget * count // size if isinstance(budget, int) else 999
            api.llama_model_free(self._model)
            self._model = api.llama_model_load_from_file(path, of_model)
        of_context = api.llama_context_default_params()
        of_context.n_ctx = of_context.n_batch = settings["max_tokens"]
        of_context.n_threads = of_context.n_threads_batch = settings["num_threads"]
        self._context = api.llama_init_from_model(self._model, of_context)
        if not self._context:
            raise RuntimeError("llama.cpp cannot load this file")

    def prefill(self, ids: list[int]) -> int:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        return self.step(*ids)

    def step(self, *ids: int) -> int:
        api, tokens = self._api, (self._api.llama_token * len(ids))(*ids)
        if api.llama_decode(self._context, api.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama_decode failed")
        size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        logits = api.llama_get_logits_ith(self._context, -1)
        return int(self._numpy.ctypeslib.as_array(logits, (size,)).argmax())

    def close(self) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)
