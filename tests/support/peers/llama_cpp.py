"""Stands in for llama.cpp's Python face: ten layers of a thousand bytes with the output matrix."""

import ctypes
from types import SimpleNamespace
from typing import Any

from recorded_calls import note

llama_token = ctypes.c_int32
SIZE = 97


def llama_supports_gpu_offload() -> bool:
    return True


def llama_backend_init() -> None: ...


def llama_model_default_params() -> SimpleNamespace:
    return SimpleNamespace(n_gpu_layers=-1)


def llama_context_default_params() -> SimpleNamespace:
    return SimpleNamespace()


def llama_model_load_from_file(path: bytes, params: SimpleNamespace) -> Any:
    note("load", path.decode(), params.use_mmap, params.n_gpu_layers)
    return SimpleNamespace()


def llama_model_size(model: Any) -> int:
    return 10_000


def llama_model_n_layer(model: Any) -> int:
    return 10


def llama_init_from_model(model: Any, params: SimpleNamespace) -> Any:
    return SimpleNamespace(sum=0, logits=None)


def llama_get_memory(context: Any) -> Any:
    return context


def llama_memory_clear(context: Any, data: bool) -> None:
    context.sum = 0


def llama_batch_get_one(tokens: Any, count: int) -> Any:
    return tokens[:count]


def llama_decode(context: Any, tokens: Any) -> int:
    context.sum += sum(tokens)
    return 0


def llama_model_get_vocab(model: Any) -> Any:
    return model


def llama_vocab_n_tokens(vocab: Any) -> int:
    return SIZE


def llama_get_logits_ith(context: Any, place: int) -> Any:
    assert place == -1
    values = (ctypes.c_float * SIZE)(*(0.0,) * SIZE)
    values[context.sum % SIZE] = 1.0
    return ctypes.cast(values, ctypes.POINTER(ctypes.c_float))


def llama_free(context: Any) -> None:
    note("free", "context")


def llama_model_free(model: Any) -> None:
    note("free", "model")
