"""The models that requests may name: loads and unloads them, and tracks who uses them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.errors import MoERuntimeError, text_of
from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.served_model import Place, ServedModel

if TYPE_CHECKING:
    from moe_runtime.serving.http.model_loader import ModelLoader


class ModelTable(Mapping[str, ServedModel]):
    """Loaded models, by name.

    A request holds its model from `hold` to `release`, and a held model stays loaded. If memory is
    short, the least recently used model is unloaded. If all models are in use, later requests wait
    behind the one that needs memory.

    All methods belong to the thread of the event loop. The loader runs in a thread of its own.
    """

    def __init__(
        self,
        places: Sequence[Place],
        loader: ModelLoader,
        *,
        idle_s: float | None = None,
        log: Callable[[str, Mapping[str, Any]], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        places: the first model answers requests that name none.
        idle_s: seconds without a request after which a model is unloaded; None for never.
        """
        self.places = places
        self._by_name = {name: one for one in places for name in (one.name, *one.adapters)}
        self._loader = loader
        self._idle_s = idle_s
        self._log = log
        self._clock = clock
        self._changing = asyncio.Lock()  # held while a model loads or unloads
        self._freed = asyncio.Event()  # the last request has released a model
        self._is_short = False  # a model waits for that
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._tasks: set[asyncio.Task[None]] = set()
        for place in places:
            place.used_s = clock()

    def __getitem__(self, name: str) -> ServedModel:
        return self._by_name[name].served[name]

    def __iter__(self) -> Iterator[str]:
        return (name for place in self.places for name in place.served)

    def __len__(self) -> int:
        return sum(len(place.served) for place in self.places)

    @property
    def names(self) -> list[str]:
        """Names of models and adapters, loaded or not."""
        return list(self._by_name)

    def place(self, name: str) -> Place:
        """The place of a model or adapter; KeyError for an unknown name."""
        return self._by_name[name]

    async def hold(self, name: str) -> Place:
        """Waits until a model is loaded, and keeps it loaded until `release`.

        Raises:
            ApiError: it cannot be loaded.
        """
        place = self._by_name[name]
        if place.served and not place.is_closing and not self._is_short:
            place.num_users += 1
            return place
        ready = asyncio.get_running_loop().create_future()
        place.waiting.append(ready)
        if len(place.waiting) == 1:
            self._begin(self._admit(place, lambda: any(not one.done() for one in place.waiting)))
        try:
            await ready
        except asyncio.CancelledError:
            self._freed.set()  # perhaps no request needs the memory any more
            if ready.done() and not ready.cancelled() and ready.exception() is None:
                self.release(place)  # the model was granted at the same moment
            raise
        return place

    def release(self, place: Place) -> None:
        place.num_users -= 1
        place.used_s = self._clock()
        if not place.num_users:
            self._freed.set()

    def load(self, name: str) -> None:
        """Begins to load a model, unless it is loaded."""
        self._begin(self._admit(self._by_name[name], lambda: True))

    def unload(self, name: str) -> None:
        """Unloads a model as soon as no request holds it."""
        self._begin(self._unload(self._by_name[name]))

    async def add_adapter(self, place: Place, name: str, folder: Path) -> None:
        """Adds an adapter to a loaded model, which the caller holds."""
        base, loop = place.served[place.name], asyncio.get_running_loop()
        add = partial(self._loader.add_adapter, base, name, folder)
        served = await loop.run_in_executor(self._worker, add)
        if name not in place.adapters:
            place.adapters.append(name)
        self._by_name[name] = place
        place.served[name] = served

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter; running requests still finish with it."""
        place = self._by_name.pop(name)
        place.adapters.remove(name)
        place.served.pop(name, None)
        self._loader.forget_adapter(place.name, name)

    def unload_idle(self) -> None:
        """Begins to unload one idle model, if there is any."""
        if self._idle_s is None or self._changing.locked():
            return
        end_s = self._clock() - self._idle_s
        for place in self._free():
            if place.used_s <= end_s:
                self._begin(self._unload(place, unused_since_s=end_s))
                return

    def _free(self) -> list[Place]:
        return [one for one in self.places if one.served and not one.num_users]

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, place: Place, is_wanted: Callable[[], bool]) -> None:
        """Loads a model if necessary, and admits the requests that wait for it."""
        while place.is_closing:
            self._freed.clear()
            await self._freed.wait()
        async with self._changing:
            try:
                if not place.served and is_wanted():
                    place.is_loading, place.failure = True, ""
                    if await self._make_room(place, is_wanted):
                        await self._load(place)
            finally:
                place.is_loading = False
                waiting, place.waiting = place.waiting, []
                for ready in waiting:
                    if ready.done():
                        continue
                    if place.served:
                        place.num_users += 1
                        ready.set_result(None)
                    else:
                        ready.set_exception(_not_loaded(place))

    async def _make_room(self, place: Place, is_wanted: Callable[[], bool]) -> bool:
        """Waits for memory; returns whether the model is still wanted then."""
        try:
            while not await self._work(self._loader.make_room, place.name):
                self._freed.clear()
                if free := self._free():
                    await self._close(min(free, key=lambda one: one.used_s))
                elif any(one.served for one in self.places):
                    self._is_short = True
                    await self._freed.wait()
                    if not is_wanted():
                        return False
                else:
                    break  # the error of loading says how much is missing
            return True
        finally:
            self._is_short = False

    async def _load(self, place: Place) -> None:
        began_s = self._clock()
        try:
            found = await self._work(self._loader.load, place.name)
        # torch reports a lack of memory as a RuntimeError
        except (MoERuntimeError, ValueError, OSError, MemoryError, RuntimeError) as error:
            place.failure = text_of(error) or type(error).__name__
            self._log("model", {"model": place.name, "status": "failed", "error": place.failure})
            return
        place.served = {model.name: model for model in found}
        place.used_s = self._clock()
        seconds = round(place.used_s - began_s, 3)
        self._log("model", {"model": place.name, "status": "loaded", "seconds": seconds})

    async def _unload(self, place: Place, unused_since_s: float | None = None) -> None:
        """Unloads a model: if it is unused since then, or as soon as no request holds it.

        Requests that arrive meanwhile wait. Other models can load and unload.
        """
        place.is_closing = unused_since_s is None
        try:
            while True:
                while place.is_closing and place.num_users:
                    self._freed.clear()
                    await self._freed.wait()
                async with self._changing:
                    if place.is_closing and place.num_users:
                        continue  # requests were admitted while this one waited for the lock
                    is_unused = unused_since_s is None or place.used_s <= unused_since_s
                    if place.served and not place.num_users and is_unused:
                        await self._close(place)
                    return
        finally:
            place.is_closing = False
            self._freed.set()

    async def _close(self, place: Place) -> None:
        place.served, was_closing, place.is_closing = {}, place.is_closing, True
        try:
            await self._work(self._loader.unload, place.name)
        finally:
            place.is_closing = was_closing
        self._log("model", {"model": place.name, "status": "unloaded"})

    def close(self) -> None:
        """Cancels loading, and waits for its end; the event loop has ended before."""
        self._loader.cancel()
        self._worker.shutdown()

    async def _work(self, work: Callable[[str], Any], name: str) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, name)


def _not_loaded(place: Place) -> ApiError:
    return ApiError(
        f"model: {place.name}: it could not be loaded; the server's log says why",
        status=503,
        param="model",
        code="model_not_loaded",
        headers={"retry-after": "1"},
    )
