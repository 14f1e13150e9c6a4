"""Loads the models of a server, one budget for all, and closes them."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

import moe_runtime
from moe_runtime.allocator import give_back_free_pages
from moe_runtime.checkpoints.adapter_files import AdapterFolder
from moe_runtime.checkpoints.opening import load_tokenizer, read_config
from moe_runtime.config import Budget
from moe_runtime.errors import CapacityError, MoERuntimeError, blamed_on
from moe_runtime.files import at_home
from moe_runtime.inference.adapters import Adapters
from moe_runtime.inference.pictures import PictureReader
from moe_runtime.kernels.native import native_library
from moe_runtime.serving.engine import Engine, Turns
from moe_runtime.serving.http.dividing import (
    SlotSharing,
    budget_of_models,
    divide_host_memory,
    is_on_cpu,
    needs_of,
    part_for,
    rest_for_model,
    with_server,
)
from moe_runtime.serving.http.limits import LimitedProcess
from moe_runtime.serving.http.served_model import Place, ServedModel, serve_model
from moe_runtime.serving.http.server import Access, Limits
from moe_runtime.serving.prefixes import PrefixDisk, identity_of
from moe_runtime.serving.requests import EngineOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """Settings of a server.

    Attributes:
        adapters: ``NAME=FOLDER``, or ``MODEL:NAME=FOLDER`` for several models.
        loading: options of ``moe_runtime.load``; all models share the budget.
        drain_s: seconds for running requests once the server stops; None for no limit.
        prefix_disk_bytes: for prefixes in the user's cache folder; None for none.
        adapter_bytes: memory for a model's adapters; None for all of them.
        loads_adapters: requests may name folders of adapters.
        body_bytes: limit of a body; None for that of `Limits`, more if a model accepts pictures.
        fetches_pictures: requests may name URLs of pictures.
        on_demand: loads a model with its first request.
        idle_s: unloads models without requests for so many seconds; None for never.
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
    loads_adapters: bool = False
    body_bytes: int | None = None
    fetches_pictures: bool = False
    on_demand: bool = False
    idle_s: float | None = None

    @property
    def is_divided(self) -> bool:
        """Whether several processes hold the model; then it has no adapters and no pictures."""
        return self.loading.get("group") is not None


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """An adapter, and the name of its model."""

    name: str
    model: str
    folder: Path


def names_of(models: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names of models in requests."""
    if names and len(names) != len(models):
        raise ValueError(
            f"--name: expected one for each of {len(models)} models in their order, or none, "
            f"got {len(names)}"
        )
    found = list(names) or [Path(model).resolve().name for model in models]
    twice = _twice(found)
    if twice is not None:
        raise ValueError(
            f"--name: two models are called {twice!r}; give each model a name of its own"
        )
    return found


def adapters_of(words: Sequence[str], models: Sequence[str]) -> list[AdapterChoice]:
    """Reads ``NAME=FOLDER``, or ``MODEL:NAME=FOLDER`` for several models."""
    found = []
    for word in words:
        name, equals, folder = word.partition("=")
        model = next((model for model in models if name.startswith(f"{model}:")), None)
        if model is not None:
            name = name.removeprefix(f"{model}:")
        is_other = model is None and (len(models) > 1 or ":" in name)
        if not (name and equals and folder) or is_other:
            form = "NAME=FOLDER" if len(models) == 1 else "MODEL:NAME=FOLDER"
            other, colon, _ = name.partition(":")
            no_model = f"; there is no model {other!r}" if colon and model is None else ""
            raise ValueError(
                f"--adapter {word}: expected {form}, with a model of {', '.join(models)}{no_model}"
            )
        found.append(AdapterChoice(name, model or models[0], Path(at_home(folder))))
    twice = _twice([*models, *(choice.name for choice in found)])
    if twice is not None:
        whose = "the name of a model" if twice in models else "the name of two"
        raise ValueError(f"--adapter: {twice!r} is {whose}; give each adapter a name of its own")
    return found


def _twice(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


class ModelLoader:
    """Loads models by name within one budget. Methods except `cancel` run in one thread.

    On a CPU, loaded models share the budget. A GPU has one model at a time.

    Raises:
        MoERuntimeError, ValueError: a checkpoint or adapter cannot be used. Or the budget is too
            small: with ``on_demand`` for one of the models, else for all together.
    """

    def __init__(
        self,
        settings: ServeSettings,
        names: Sequence[str],
        folders: Sequence[Path],
        choices: Sequence[AdapterChoice],
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._settings = settings
        self._folders = dict(zip(names, folders, strict=True))
        self._progress = progress
        self._is_cancelled = False
        given = {choice.name: AdapterFolder(choice.folder) for choice in choices}
        self._adapters = {
            name: {one.name: given[one.name] for one in choices if one.model == name}
            for name in names
        }
        self.places = [
            Place(name, list(self._adapters[name]), self._reader(folder, None) is not None)
            for name, folder in self._folders.items()
        ]
        loading = settings.loading
        self._is_alone = len(names) == 1 and not choices and not settings.loads_adapters
        self._keys = itertools.count()
        self._divides = is_on_cpu(loading) or not settings.on_demand or bool(choices)
        self._needs = {}
        total_bytes = 0
        if not self._is_alone and self._divides:
            own = list(self._adapters.values())
            self._needs = needs_of(
                names, folders, own, loading, settings.adapter_bytes,
                loads_adapters=settings.loads_adapters,
            )  # fmt: skip
            total_bytes = budget_of_models(loading, len(names))
            if settings.on_demand:
                for name, need in self._needs.items():
                    divide_host_memory({name: need}, loading)
        self._sharing = SlotSharing(Turns(), total_bytes)
        self._open: dict[str, tuple[Any, contextlib.ExitStack]] = {}
        self._stack = contextlib.ExitStack()
        self._templates, self._trials = (
            self._stack.enter_context(contextlib.closing(LimitedProcess(kind)))
            for kind in ("templates", "grammars")
        )

    def load_all(self) -> None:
        """Loads every model with its share of the budget."""
        budgets = [rest_for_model(self._settings.loading)]
        if not self._is_alone:
            budgets = divide_host_memory(self._needs, self._settings.loading)
        for place, budget in zip(self.places, budgets, strict=True):
            place.served = {model.name: model for model in self._load(place.name, budget)}
        self._progress = None  # models that load later show no progress

    def loaded(self) -> list[Any]:
        return [model for model, _ in self._open.values()]

    def make_room(self, name: str) -> bool:
        """Takes memory of experts from loaded models; returns whether it suffices for another."""
        if not self._needs:
            return not self._open
        return self._sharing.make_room(self._needs[name])

    def load(self, name: str) -> Sequence[ServedModel]:
        """Loads a model and its adapters into the memory that `make_room` found."""
        loading = self._settings.loading
        try:
            if not self._needs:
                budget = rest_for_model(loading)
            elif room_bytes := self._sharing.room_bytes:
                budget = part_for(loading, room_bytes, self._needs[name].adapter_bytes)
            else:
                (budget,) = divide_host_memory({name: self._needs[name]}, loading)
            return self._load(name, budget)
        finally:
            _collect()  # also the remains of a model that failed to load
            self._sharing.leave_room()

    def add_adapter(self, base: ServedModel, name: str, folder: Path) -> ServedModel:
        """Adds an adapter. An earlier one of this name stays until its requests end."""
        found = AdapterFolder(folder)
        key = f"{name} {next(self._keys)}"
        base.engine.add_adapter(key, found)
        self._adapters[base.name][name] = found
        return replace(base, name=name, parent=base.name, adapter=key)

    def forget_adapter(self, model: str, name: str) -> None:
        del self._adapters[model][name]

    def unload(self, name: str) -> None:
        """Closes a model; its memory goes back to the system, then to other models."""
        stack = self._open.pop(name)[1]
        try:
            stack.close()
        finally:
            _collect(unfreezes=True)
            self._sharing.leave_room()

    def cancel(self) -> None:
        """Ends loading with an error; from any thread."""
        self._is_cancelled = True

    def close(self) -> None:
        with self._stack:
            for _, stack in self._open.values():
                self._stack.push(stack)

    def _load(self, name: str, budget: Budget) -> Sequence[ServedModel]:
        settings, folder, own = self._settings, self._folders[name], self._adapters[name]
        tokenizer = load_tokenizer(folder)
        if tokenizer.chat_template is not None:
            self._templates.start()  # while the model loads
        options = {**settings.loading, "host_memory": budget}
        with contextlib.ExitStack() as stack:
            try:
                loaded: Any = moe_runtime.load(folder, progress=self._show, **options)
            except CapacityError as error:
                raise with_server(error, settings.loading) if self._is_alone else error from None
            stack.enter_context(contextlib.closing(loaded.moe))
            turns = None
            if len(self._folders) > 1:
                need = self._needs.get(name)
                turns = self._sharing.add(loaded.moe, 0 if need is None else need.adapter_bytes)
                stack.callback(self._sharing.remove, loaded.moe)
            most, takes_more = settings.adapter_bytes, settings.loads_adapters
            engine = Engine(
                loaded,
                settings.engine,
                turns=turns,
                adapters=Adapters(loaded, own, max_bytes=most, takes_more=takes_more),
                prefix_disk=_prefix_disk(settings, folder, loaded),
            )
            stack.enter_context(engine)
            with blamed_on(f"{folder}: the chat template cannot be used"):
                model = serve_model(
                    name,
                    engine,
                    tokenizer,
                    loaded,
                    self._templates,
                    self._trials,
                    self._reader(folder, tokenizer),
                    fetches_pictures=settings.fetches_pictures,
                )
            self._open[name] = loaded, stack.pop_all()
        return [model, *(replace(model, name=one, parent=name, adapter=one) for one in own)]

    def _show(self, stage: str, done: int, total: int) -> None:
        if self._is_cancelled:
            raise MoERuntimeError("the server is shutting down")
        if self._progress is not None:
            self._progress(stage, done, total)

    def _reader(self, folder: Path, tokenizer: Any) -> PictureReader | None:
        if self._settings.is_divided:
            return None
        return PictureReader.of(folder, read_config(folder), tokenizer)


def _collect(*, unfreezes: bool = False) -> None:
    """Gives the memory of a closed model back to the system, cycles included.

    The server's objects are frozen again at once, so that later collections skip them. Cycles of
    running requests may therefore stay until the next model is unloaded.
    """
    freezes = gc.get_freeze_count() > 0
    if unfreezes:
        gc.unfreeze()
    gc.collect()
    if freezes:
        gc.freeze()
    give_back_free_pages()


def load_to_follow(settings: ServeSettings) -> Any:
    """The model of a divided server, in a process other than the first."""
    budget = rest_for_model(settings.loading)
    return moe_runtime.load(settings.models[0], **{**settings.loading, "host_memory": budget})


def user_cache(name: str) -> Path:
    return platformdirs.user_cache_path("moe-runtime") / name


def _prefix_disk(settings: ServeSettings, checkpoint: Path, model: Any) -> PrefixDisk | None:
    if settings.prefix_disk_bytes is None:
        return None
    library = native_library()
    computing = (
        str(model.dtype),
        str(model.device),
        *(str(settings.loading.get(name, "exact")) for name in ("activations", "kv_cache")),
        "torch" if library is None else library.isa,
        "exact" if settings.engine.exact else "",
        *(str(settings.loading.get(name, "")) for name in ("routing", "skip_below", "misses")),
    )
    return PrefixDisk(
        user_cache("prefixes"), settings.prefix_disk_bytes, identity_of(checkpoint, *computing)
    )
