"""Starts this server for tests of other servers: the bundled model under the names they ask for."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from http_server import TEMPLATE, started

from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.http.server import Server

_LOADING = {"device": "cpu", "dtype": "auto", "host_memory": "1GiB", "cache_code": "none"}
_LOADING |= {"kv_cache": "exact", "misses": "device", "draft": "none"}
_POSITIONS = 16384
"""That the bundled model says it has: their prompts are longer than its training's."""


@contextlib.contextmanager
def serving(
    names: Sequence[str], template: str = TEMPLATE, max_tokens: int = 8192, **more: Any
) -> Iterator[str]:
    """The address of a server that lasts as long as the block."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = shutil.copytree(pocket_path(), folder / "pocket")
        _change(model / "config.json", {"max_position_embeddings": _POSITIONS})
        _change(model / "tokenizer_config.json", {"chat_template": template})
        loading = {**_LOADING, "max_tokens": max_tokens}
        models = [str(model)] * len(names)
        site, _ = stack.enter_context(started(models, loading, names=names, **more))
        yield site.address


def _change(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def answer_to_any_name(server: Server, name: str | None) -> str:
    """llama.cpp's server does not look at the model's name where it has one model."""
    names = server.models.names
    return name if name is not None and name in names else names[0]


def skip_foreign(items: Sequence[pytest.Item], reasons: Mapping[str, str]) -> None:
    """Skips tests that do not apply: by reasons, their names, with one parameter or with all, or
    the names of their files."""
    names = {name: why for why, text in reasons.items() for name in text.split()}
    for item in items:
        first = item.name.split()[0]
        plain, _, given = first.partition("[")
        own = first, plain, item.path.name, f"{item.path.name}::{plain}"
        own += tuple(f"{plain}[{part}]" for part in given.rstrip("]").split("-"))
        found = next((names[name] for name in own if name in names), None)
        if found is not None:
            item.add_marker(pytest.mark.skip(reason=found))
