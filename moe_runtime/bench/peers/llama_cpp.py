"""llama.cpp through its Python wheel, weights mapped from a GGUF file: MODEL must be one."""

from typing import Any

INSTALL = "pip install llama-cpp-python"
PACKAGES = ("llama-cpp-python",)


class Peer:
    """Needs ``model``, ``num_threads`` and ``max_tokens``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp
        import numpy

        if not settings["model"].endswith(".gguf"):
            raise ValueError(f"llama.cpp reads GGUF files, and {settings['model']} is none")
        self._api: Any = llama_cpp
        self._settings, self._numpy = settings, numpy

    def load(self) -> None:
        """Maps the file."""
        api, settings = self._api, self._settings
        api.llama_backend_init()
        of_model = api.llama_model_default_params()
        of_model.use_mmap, of_model.n_gpu_layers = True, 0
        self._model = api.llama_model_load_from_file(settings["model"].encode(), of_model)
        of_context = api.llama_context_default_params()
        of_context.n_ctx = of_context.n_batch = settings["max_tokens"]
        of_context.n_threads = of_context.n_threads_batch = settings["num_threads"]
        self._context = api.llama_init_from_model(self._model, of_context)
        if not self._context:
            raise RuntimeError("llama.cpp cannot load this file")

    def prefill(self, ids: list[int]) -> int:
        """Forgets everything, reads the ids, returns the likeliest next one."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._decode(ids)
        return self._likeliest()

    def step(self, token: int) -> int:
        """Appends a token, returns the likeliest next one."""
        self._decode([token])
        return self._likeliest()

    def close(self) -> None:
        """Frees the model."""
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _decode(self, ids: list[int]) -> None:
        tokens = (self._api.llama_token * len(ids))(*ids)
        if self._api.llama_decode(self._context, self._api.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama_decode failed")

    def _likeliest(self) -> int:
        api = self._api
        size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        logits = api.llama_get_logits_ith(self._context, -1)
        return int(self._numpy.ctypeslib.as_array(logits, (size,)).argmax())
