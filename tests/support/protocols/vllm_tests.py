"""A plugin of pytest: vLLM's tests of its server run against this one, as they are."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import itertools
import sys
import types
from collections.abc import Sequence
from typing import Any

import anthropic
import openai
import pytest
from http_server import TEMPLATE
from protocol_server import serving, skip_foreign

from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.http.server import Access

_REASONS: dict[str, str] = {}
_TEMPLATE = TEMPLATE.partition("assistant:{%")[0] + "assistant:{% endif %}"
"""Of a model that does not think."""


class RemoteOpenAIServer:
    """Takes the place of the program that vLLM's tests start."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, words: Sequence[str] = (), **_: Any) -> None:
        given = dict(itertools.pairwise(words))
        self._name = given.get("--served-model-name", model)
        key = given.get("--api-key")
        self._access = Access(keys=(key,) if key else ())
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RemoteOpenAIServer:
        made = serving([self._name], _TEMPLATE, access=self._access)
        self._address = self._stack.enter_context(made)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url_for(self, *parts: str) -> str:
        return "/".join([self._address, *parts])

    def get_client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(**{**self._common("v1"), **more})

    def get_async_client(self, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**{**self._common("v1"), **more})

    def get_async_client_anthropic(self, **more: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**{**self._common(), **more})

    def _common(self, *parts: str) -> dict[str, Any]:
        address = self.url_for(*parts)
        return {"base_url": address, "api_key": self.DUMMY_API_KEY, "max_retries": 0}


class _Absent:
    """A function or class of vLLM: a test that uses one is about it, and not about the server."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip("tests functions of vLLM's own")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)

    def __or__(self, _: Any) -> _Absent:
        return self

    __ror__ = __or__


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of vLLM, with nothing in it but what tests of the server read."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        found = types.ModuleType(spec.name)
        found.__getattr__ = lambda name: _of_vllm(name)  # type: ignore[attr-defined]
        return found

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _of_vllm(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "get_tokenizer":
        return lambda *_, **__: load_tokenizer(pocket_path())
    if name == "hf_api":  # adapters are not downloaded, and not used
        return lambda: types.SimpleNamespace(snapshot_download=lambda **_: "")
    return _Absent()


def pytest_load_initial_conftests() -> None:
    sys.meta_path.insert(0, _Stubs())
    utils = types.ModuleType("tests.utils")
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    utils.ROCM_EXTRA_ARGS = []  # type: ignore[attr-defined]
    utils.__getattr__ = lambda name: _of_vllm(name)  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = utils


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_foreign(items, _REASONS)
