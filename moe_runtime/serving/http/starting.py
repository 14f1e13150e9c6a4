"""From a model's name to a running server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moe_runtime
from moe_runtime.checkpoints.model_files import find_checkpoint, load_tokenizer
from moe_runtime.errors import blamed_on
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.engine_options import EngineOptions
from moe_runtime.serving.http.running import address_of, listen, serve
from moe_runtime.serving.http.served_model import ServedModel, serve_model
from moe_runtime.serving.http.server import Access, Limits, Log, Server

_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """All that is said about a server before it starts.

    Attributes:
        model: folder, GGUF file, or name on the hub.
        name: by which requests ask for it; the last part of ``model`` where None.
        host: address to listen at.
        port: 0 for any that is free.
        loading: options of ``moe_runtime.load``.
        engine: how work is divided.
        limits: what one request may ask for.
        access: who may ask.
        drain_s: seconds for taken requests once the server stops; None for as long as they take.
    """

    model: str
    name: str | None
    host: str
    port: int
    loading: Mapping[str, Any]
    engine: EngineOptions
    limits: Limits
    access: Access
    drain_s: float | None


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that answers.

    Attributes:
        address: as clients write it.
        model: that it serves.
        loaded: the model itself.
    """

    address: str
    model: ServedModel
    loaded: Any


def run_server(
    settings: ServeSettings,
    *,
    log: Log,
    on_ready: Callable[[Ready], None],
    is_stopping: Callable[[], bool],
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Loads a model and answers requests until it is told to stop.

    Args:
        settings: of the server.
        log: takes one event for each request.
        on_ready: called once, when requests are answered from now on.
        is_stopping: whether to take no more requests; looked at all the time.
        progress: of loading.

    Raises:
        MoERuntimeError: the model cannot be loaded, or the address be taken.
        ValueError: an option is out of range.
    """
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(settings.host, settings.port))
        folder = find_checkpoint(settings.model)
        tokenizer = load_tokenizer(folder)
        loaded: Any = moe_runtime.load(folder, progress=progress, **settings.loading)
        stack.enter_context(contextlib.closing(loaded.moe))
        engine = stack.enter_context(Engine(loaded, settings.engine))
        name = settings.name or Path(settings.model).resolve().name
        with blamed_on(f"{folder}: the chat template cannot be used"):
            model = serve_model(name, engine, tokenizer, loaded)
        server = Server(
            models={name: model}, limits=settings.limits, access=settings.access, log=log
        )
        # Who calls from now on is answered, if a moment later.
        listening.listen(_BACKLOG)
        on_ready(Ready(address_of(listening), model, loaded))
        serve(server, listening, is_stopping=is_stopping, drain_s=settings.drain_s)
