"""The models that requests may name: which are loaded, for whom, and how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from moe_runtime.errors import MoERuntimeError
from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.served_model import ServedModel

Status = Literal["unloaded", "loading", "loaded"]


class Loader(Protocol):
    """Loads models and closes them; called from one thread at a time."""

    def make_room(self, name: str) -> bool:
        """Whether there is memory for a model beside those that are loaded."""
        ...

    def load(self, name: str) -> Sequence[ServedModel]:
        """A model, and one for each of its adapters."""
        ...

    def unload(self, name: str) -> None: ...

    def add_adapter(self, base: ServedModel, name: str, folder: Path) -> ServedModel:
        """A loaded model with an adapter more."""
        ...

    def forget_adapter(self, model: str, name: str) -> None: ...

    def cancel(self) -> None:
        """Ends loading that is under way with an error; from any thread."""
        ...


@dataclass(slots=True, eq=False)
class Place:
    """A model that requests may name, loaded or not.

    Attributes:
        adapters: their names.
        takes_pictures: as its files say.
        served: the model and its adapters by name; empty while it is not loaded.
        num_users: requests that hold it.
        failure: why it could not be loaded the last time; empty where it could.
    """

    name: str
    adapters: list[str] = field(default_factory=list)
    takes_pictures: bool = False
    served: dict[str, ServedModel] = field(default_factory=dict)
    num_users: int = 0
    failure: str = ""
    created_s: int = field(default_factory=lambda: int(time.time()))
    _used_s: float = 0.0
    _is_loading: bool = False
    _is_closing: bool = False
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def status(self) -> Status:
        is_there = self.served or self._is_closing
        return "loading" if self._is_loading else "loaded" if is_there else "unloaded"


class ModelTable(Mapping[str, ServedModel]):
    """Models by name; as a mapping, those that are loaded.

    A request holds its model from `hold` to `release`; only a model that none holds is unloaded.
    Where memory is short, the least recently used one goes. Where all are in use, requests that
    arrive later wait behind the one that needs memory, so that each has its turn.

    All methods belong to the thread of the event loop.
    """

    def __init__(
        self,
        places: Sequence[Place],
        loader: Loader,
        *,
        idle_s: float | None = None,
        log: Callable[[str, Mapping[str, Any]], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        places: the first one's model answers requests that name none.
        idle_s: seconds without a request after which a model is unloaded; None for never.
        """
        self.places = places
        self._by_name = {name: one for one in places for name in (one.name, *one.adapters)}
        self._loader = loader
        self._idle_s = idle_s
        self._log = log
        self._clock = clock
        self._changing = asyncio.Lock()  # held by what loads or unloads
        self._freed = asyncio.Event()  # a model is held by no request any more
        self._is_short = False  # a model waits until another is held by no request
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._tasks: set[asyncio.Task[None]] = set()
        for place in places:
            place._used_s = clock()

    def __getitem__(self, name: str) -> ServedModel:
        return self._by_name[name].served[name]

    def __iter__(self) -> Iterator[str]:
        return (name for place in self.places for name in place.served)

    def __len__(self) -> int:
        return sum(len(place.served) for place in self.places)

    @property
    def names(self) -> list[str]:
        """Of models and adapters, loaded or not."""
        return list(self._by_name)

    def place(self, name: str) -> Place:
        """Of a model or adapter; a KeyError where there is none."""
        return self._by_name[name]

    async def hold(self, name: str) -> Place:
        """Waits until a model is loaded, and keeps it so until `release`.

        Raises:
            ApiError: it cannot be loaded.
        """
        place = self._by_name[name]
        if place.served and not place._is_closing and not self._is_short:
            place.num_users += 1
            return place
        ready = asyncio.get_running_loop().create_future()
        place._waiting.append(ready)
        if len(place._waiting) == 1:
            self._begin(self._admit(place, lambda: any(not one.done() for one in place._waiting)))
        try:
            await ready
        except asyncio.CancelledError:
            self._freed.set()  # nobody may want the memory any more
            if ready.done() and not ready.cancelled() and ready.exception() is None:
                self.release(place)  # it had just been given
            raise
        return place

    def release(self, place: Place) -> None:
        place.num_users -= 1
        place._used_s = self._clock()
        if not place.num_users:
            self._freed.set()

    def load(self, name: str) -> None:
        """Begins to load a model, if it is not there."""
        self._begin(self._admit(self._by_name[name], lambda: True))

    def unload(self, name: str) -> None:
        """Begins to unload a model, once no request holds it."""
        self._begin(self._unload(self._by_name[name]))

    async def add_adapter(self, place: Place, name: str, folder: Path) -> None:
        """Serves a loaded model, which the caller holds, with an adapter by another name."""
        base, loop = place.served[place.name], asyncio.get_running_loop()
        add = partial(self._loader.add_adapter, base, name, folder)
        served = await loop.run_in_executor(self._worker, add)
        if name not in place.adapters:
            place.adapters.append(name)
        self._by_name[name] = place
        place.served[name] = served

    def remove_adapter(self, name: str) -> None:
        """Serves an adapter no more; requests that have it end with it."""
        place = self._by_name.pop(name)
        place.adapters.remove(name)
        place.served.pop(name, None)
        self._loader.forget_adapter(place.name, name)

    def unload_idle(self) -> None:
        """Begins to unload models that were not asked for lately."""
        if self._idle_s is None or self._changing.locked():
            return
        end_s = self._clock() - self._idle_s
        for place in self._free():
            if place._used_s <= end_s:
                self._begin(self._unload(place, unused_since_s=end_s))
                return  # another one next time

    def _free(self) -> list[Place]:
        """Loaded models that no request holds."""
        return [one for one in self.places if one.served and not one.num_users]

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, place: Place, is_wanted: Callable[[], bool]) -> None:
        """Loads a model where it is not, and lets those in who wait for it."""
        while place._is_closing:
            self._freed.clear()
            await self._freed.wait()
        async with self._changing:
            try:
                if not place.served and is_wanted():
                    place._is_loading, place.failure = True, ""
                    if await self._make_room(place, is_wanted):
                        await self._load(place)
            finally:
                place._is_loading = False
                waiting, place._waiting = place._waiting, []
                for ready in waiting:
                    if ready.done():
                        continue
                    if place.served:
                        place.num_users += 1
                        ready.set_result(None)
                    else:
                        ready.set_exception(_not_loaded(place))

    async def _make_room(self, place: Place, is_wanted: Callable[[], bool]) -> bool:
        """Gives whether the model is still wanted when there is memory for it."""
        try:
            while not await self._work(self._loader.make_room, place.name):
                self._freed.clear()
                if free := self._free():
                    await self._close(min(free, key=lambda one: one._used_s))
                elif any(one.served for one in self.places):
                    self._is_short = True
                    await self._freed.wait()
                    if not is_wanted():
                        return False
                else:
                    break  # loading says what is missing
            return True
        finally:
            self._is_short = False

    async def _load(self, place: Place) -> None:
        began_s = self._clock()
        try:
            found = await self._work(self._loader.load, place.name)
        # torch reports a lack of memory as a RuntimeError
        except (MoERuntimeError, ValueError, OSError, MemoryError, RuntimeError) as error:
            place.failure = str(error) or type(error).__name__
            self._log("model", {"model": place.name, "status": "failed", "error": place.failure})
            return
        place.served = {model.name: model for model in found}
        place._used_s = self._clock()
        seconds = round(place._used_s - began_s, 3)
        self._log("model", {"model": place.name, "status": "loaded", "seconds": seconds})

    async def _unload(self, place: Place, unused_since_s: float | None = None) -> None:
        """Unloads a model, if it is unused since then, or once no request holds it. Requests that
        arrive meanwhile wait, and other models come and go."""
        place._is_closing = unused_since_s is None
        try:
            while True:
                while place._is_closing and place.num_users:
                    self._freed.clear()
                    await self._freed.wait()
                async with self._changing:
                    if place._is_closing and place.num_users:
                        continue  # they were let in before
                    is_unused = unused_since_s is None or place._used_s <= unused_since_s
                    if place.served and not place.num_users and is_unused:
                        await self._close(place)
                    return
        finally:
            place._is_closing = False
            self._freed.set()

    async def _close(self, place: Place) -> None:
        place.served, was_closing, place._is_closing = {}, place._is_closing, True
        try:
            await self._work(self._loader.unload, place.name)
        finally:
            place._is_closing = was_closing
        self._log("model", {"model": place.name, "status": "unloaded"})

    def close(self) -> None:
        """Ends what is being loaded, and waits for it; the loop has ended."""
        self._loader.cancel()
        self._worker.shutdown()

    async def _work(self, work: Callable[[str], Any], name: str) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, name)


def _not_loaded(place: Place) -> ApiError:
    why = "it could not be loaded; the server's log says why"
    return ApiError(
        f"model: {place.name}: {why}",
        status=503,
        param="model",
        code="model_not_loaded",
        headers={"retry-after": "1"},
    )
