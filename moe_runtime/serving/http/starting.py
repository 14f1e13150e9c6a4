"""From models' names to a running server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

import moe_runtime
from moe_runtime.checkpoints.model_files import find_checkpoint, load_tokenizer
from moe_runtime.errors import CapacityError, blamed_on
from moe_runtime.kernels.native import native_library
from moe_runtime.serving.adapter_folder import AdapterFolder
from moe_runtime.serving.adapters import Adapters
from moe_runtime.serving.caches.prefix_files import PrefixDisk, identity_of
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.engine_options import EngineOptions
from moe_runtime.serving.http.limited_process import LimitedProcess
from moe_runtime.serving.http.models.dividing import divide_host_memory, rest_for_model, with_server
from moe_runtime.serving.http.models.naming import adapters_of, names_of
from moe_runtime.serving.http.models.served_model import ServedModel, serve_model
from moe_runtime.serving.http.models.slot_sharing import SlotSharing
from moe_runtime.serving.http.running import accept_clients, address_of, listen, serve
from moe_runtime.serving.http.server import Access, Limits, Log, Server
from moe_runtime.serving.turns import Turns

_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """All that is said about a server before it starts.

    Attributes:
        models: folders, GGUF files, or names on the hub; requests that name none get the first.
        names: by which requests ask for them; the last parts of ``models`` where there are none.
        adapters: ``NAME=FOLDER``, or ``MODEL:NAME=FOLDER`` where there are several models.
        host: address to listen at.
        port: 0 for any that is free.
        loading: options of ``moe_runtime.load``; the budget is that of all models together.
        engine: how work is divided.
        limits: what one request may ask for.
        access: who may ask.
        drain_s: seconds for taken requests once the server stops; None for as long as they take.
        prefix_disk_bytes: of prefixes in the user's cache; None for none.
        adapter_bytes: of a model's adapters that are in memory at a time; None for that of all.
    """

    models: Sequence[str]
    names: Sequence[str]
    adapters: Sequence[str]
    host: str
    port: int
    loading: Mapping[str, Any]
    engine: EngineOptions
    limits: Limits
    access: Access
    drain_s: float | None
    prefix_disk_bytes: int | None = None
    adapter_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that answers.

    Attributes:
        address: as clients write it.
        models: that it serves.
        adapters: of these models.
        loaded: the models themselves, in the same order.
    """

    address: str
    models: Sequence[ServedModel]
    adapters: Sequence[ServedModel]
    loaded: Sequence[Any]


def run_server(
    settings: ServeSettings,
    *,
    log: Log,
    on_ready: Callable[[Ready], None],
    is_stopping: Callable[[], bool],
    is_cut_off: Callable[[], bool] = lambda: False,
    on_answered: Callable[[], None] = lambda: None,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Loads models and answers requests until it is told to stop.

    Args:
        settings: of the server.
        log: takes one event for each request.
        on_ready: called once, when requests are answered from now on.
        is_stopping: whether to take no more requests; looked at all the time.
        is_cut_off: whether to end those that were taken too; likewise.
        on_answered: called once, when every client has its answer or its error.
        progress: of loading.

    Raises:
        MoERuntimeError: a model cannot be loaded, or the address be taken.
        ValueError: an option is out of range, or two models or adapters have one name.
    """
    if settings.prefix_disk_bytes is not None and not settings.engine.reuses_prefixes:
        raise ValueError("--prefix-disk keeps what --no-prefix-cache does not: give one of them")
    if settings.access.shares_prefixes and not (
        settings.access.keys and settings.engine.reuses_prefixes
    ):
        raise ValueError(
            "--share-prefixes shares the prefix cache between API keys: give --api-keys, and leave "
            "--no-prefix-cache out"
        )
    names = names_of(settings.models, settings.names)
    choices = adapters_of(settings.adapters, names)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(settings.host, settings.port))
        folders = [find_checkpoint(model, progress=progress) for model in settings.models]
        tokenizers = [load_tokenizer(folder) for folder in folders]
        given = {choice.name: AdapterFolder(choice.folder) for choice in choices}
        own = [
            {choice.name: given[choice.name] for choice in choices if choice.model == name}
            for name in names
        ]
        is_alone = len(folders) == 1 and not choices
        budgets = [rest_for_model(settings.loading)]
        if not is_alone:
            budgets = divide_host_memory(
                names, folders, own, settings.loading, settings.adapter_bytes
            )
        templates, trials = (
            stack.enter_context(contextlib.closing(LimitedProcess(kind)))
            for kind in ("templates", "grammars")
        )
        if any(tokenizer.chat_template is not None for tokenizer in tokenizers):
            templates.start()  # it is ready when the models are
        sharing, models, adapters, all_loaded = SlotSharing(Turns()), [], [], []
        for index, folder in enumerate(folders):
            options = {**settings.loading, "host_memory": budgets[index]}
            try:
                loaded: Any = moe_runtime.load(folder, progress=progress, **options)
            except CapacityError as error:
                raise with_server(error, settings.loading) if is_alone else error from None
            stack.enter_context(contextlib.closing(loaded.moe))
            turns = sharing.add(loaded.moe) if len(folders) > 1 else None
            engine = Engine(
                loaded,
                settings.engine,
                turns=turns,
                adapters=Adapters(loaded, own[index], max_bytes=settings.adapter_bytes),
                prefix_disk=_prefix_disk(settings, folder, loaded),
            )
            stack.enter_context(engine)
            with blamed_on(f"{folder}: the chat template cannot be used"):
                model = serve_model(
                    names[index], engine, tokenizers[index], loaded, templates, trials
                )
            models.append(model)
            adapters += [replace(model, name=name, parent=model.name) for name in own[index]]
            all_loaded.append(loaded)
        most_open = settings.engine.most_running + settings.engine.most_waiting
        server = Server(
            models={model.name: model for model in (*models, *adapters)},
            limits=replace(settings.limits, choices=min(settings.limits.choices, most_open)),
            access=settings.access,
            log=log,
        )
        # Who calls from now on is answered, if a moment later.
        accept_clients(listening, _BACKLOG)
        on_ready(Ready(address_of(listening), models, adapters, all_loaded))
        serve(
            server,
            listening,
            is_stopping=is_stopping,
            is_cut_off=is_cut_off,
            drain_s=settings.drain_s,
        )
        on_answered()


def _prefix_disk(settings: ServeSettings, checkpoint: Path, model: Any) -> PrefixDisk | None:
    if settings.prefix_disk_bytes is None:
        return None
    library = native_library()
    computing = (
        str(model.dtype),
        str(model.device),
        str(settings.loading.get("activations", "exact")),
        "torch" if library is None else library.isa,
        "exact" if settings.engine.exact else "",
    )
    folder = platformdirs.user_cache_path("moe-runtime") / "prefixes"
    return PrefixDisk(folder, settings.prefix_disk_bytes, identity_of(checkpoint, *computing))
