"""Models that are loaded when they are asked for: who waits, who goes, and who is told."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moe_runtime.errors import CapacityError
from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.model_table import ModelTable
from moe_runtime.serving.http.served_model import Place


class ScriptedLoader:
    """Has room for so many models at a time, and says what it did."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.loaded: set[str] = set()
        self.done: list[str] = []
        self.failure: Exception | None = None
        self.may_load = threading.Event()  # what loading waits for
        self.may_load.set()

    def make_room(self, name: str) -> bool:
        return len(self.loaded) < self.room

    def load(self, name: str) -> list[Any]:
        assert self.may_load.wait(600)
        assert name not in self.loaded
        assert len(self.loaded) < self.room
        if self.failure is not None:
            raise self.failure
        self.loaded.add(name)
        self.done.append(f"+{name}")
        return [SimpleNamespace(name=name), SimpleNamespace(name=f"{name}-lora")]

    def unload(self, name: str) -> None:
        self.loaded.remove(name)
        self.done.append(f"-{name}")

    def cancel(self) -> None:
        self.may_load.set()


class Stage:
    """A table over a scripted loader, at a time that the test says."""

    def __init__(self, room: int, names: str = "abc", idle_s: float | None = None) -> None:
        self.loader, self.now_s = ScriptedLoader(room), 0.0
        places = [Place(name, [f"{name}-lora"]) for name in names]
        self.table = ModelTable(places, self.loader, idle_s=idle_s, clock=lambda: self.now_s)

    async def use(self, name: str) -> None:
        """A request that asks for a model, and is answered."""
        self.now_s += 1
        self.table.release(await self.table.hold(name))

    async def settled(self) -> None:
        while self.table._tasks:
            await asyncio.gather(*self.table._tasks)

    def statuses(self) -> list[str]:
        return [place.status for place in self.table.places]


async def turn() -> None:
    """Lets all that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(scenario: Callable[[Stage], Awaitable[None]], stage: Stage) -> Stage:
    try:
        asyncio.run(scenario(stage))  # type: ignore[arg-type]
    finally:
        stage.table.close()
    return stage


def test_a_model_is_loaded_for_its_first_request_and_others_of_it_wait():
    async def scenario(stage: Stage) -> None:
        stage.loader.may_load.clear()
        requests = [asyncio.ensure_future(stage.table.hold(name)) for name in ("a", "a-lora", "a")]
        await turn()
        assert stage.statuses() == ["loading", "unloaded", "unloaded"]
        assert not any(request.done() for request in requests)
        stage.loader.may_load.set()
        for request in requests:
            assert (await request).name == "a"
        assert list(stage.table) == ["a", "a-lora"]
        assert stage.table.places[0].num_users == 3

    assert run(scenario, Stage(room=2)).loader.done == ["+a"]


def test_the_least_recently_used_model_goes_where_memory_is_short():
    async def scenario(stage: Stage) -> None:
        for name in ("a", "b", "a", "c", "a", "b"):
            await stage.use(name)
        assert stage.statuses() == ["loaded", "loaded", "unloaded"]

    assert run(scenario, Stage(room=2)).loader.done == ["+a", "+b", "-b", "+c", "-c", "+b"]


def test_a_model_in_use_stays_and_those_who_need_its_memory_take_turns():
    """Later requests of the model in use wait behind the one that needs its memory."""

    async def scenario(stage: Stage) -> None:
        order: list[str] = []

        async def ask(name: str) -> None:
            await stage.use(name)
            order.append(name)

        first = await stage.table.hold("a")
        others = [asyncio.ensure_future(ask("b"))]
        while not stage.table._is_short:
            await asyncio.sleep(0)
        others += [asyncio.ensure_future(ask(name)) for name in ("a", "c")]
        await turn()
        assert stage.loader.done == ["+a"]
        assert not order
        stage.table.release(first)
        await asyncio.gather(*others)
        assert order == ["b", "a", "c"]

    done = ["+a", "-a", "+b", "-b", "+a", "-a", "+c"]
    assert run(scenario, Stage(room=1)).loader.done == done


def test_unloading_waits_for_requests_and_the_next_one_loads_again():
    async def scenario(stage: Stage) -> None:
        first = await stage.table.hold("a")
        stage.table.unload("a")
        await turn()
        second = asyncio.ensure_future(stage.table.hold("a-lora"))
        await turn()
        assert not second.done()  # it would keep the model
        stage.table.release(first)
        stage.table.release(await second)
        for _ in range(2):  # the second time there is nothing to do
            stage.table.unload("a")
            await stage.settled()
        assert stage.statuses() == ["unloaded"] * 3
        stage.table.load("b")
        await stage.settled()
        assert stage.statuses() == ["unloaded", "loaded", "unloaded"]

    assert run(scenario, Stage(room=1)).loader.done == ["+a", "-a", "+a", "-a", "+b"]


def test_a_model_that_nobody_asks_for_is_unloaded():
    async def scenario(stage: Stage) -> None:
        await stage.use("a")
        held = await stage.table.hold("b")
        stage.now_s += 9
        stage.table.unload_idle()
        await stage.settled()
        assert stage.statuses() == ["loaded", "loaded", "unloaded"]
        stage.now_s += 1
        for _ in range(3):
            stage.table.unload_idle()
            await stage.settled()
        assert stage.statuses() == ["unloaded", "loaded", "unloaded"]
        stage.table.release(held)
        stage.now_s += 10
        stage.table.unload_idle()
        await stage.settled()

    assert run(scenario, Stage(room=2, idle_s=10)).loader.done == ["+a", "+b", "-a", "-b"]


def test_a_model_that_is_unloaded_late_holds_up_no_other():
    async def scenario(stage: Stage) -> None:
        held = await stage.table.hold("a")
        stage.table.unload("a")
        await stage.use("b")
        stage.table.release(held)
        await stage.settled()
        assert stage.statuses() == ["unloaded", "loaded", "unloaded"]

    assert run(scenario, Stage(room=2)).loader.done == ["+a", "+b", "-a"]


def test_an_idle_model_that_is_asked_for_just_now_stays():
    async def scenario(stage: Stage) -> None:
        await stage.use("a")
        stage.now_s += 10
        stage.table.unload_idle()
        held = await stage.table.hold("a")
        await stage.settled()
        assert stage.statuses() == ["loaded", "unloaded", "unloaded"]
        stage.table.release(held)

    assert run(scenario, Stage(room=1, idle_s=10)).loader.done == ["+a"]


@pytest.mark.parametrize(
    "error", [CapacityError("too\nsmall"), MemoryError(), RuntimeError("torch lacks memory")]
)
def test_a_model_that_cannot_be_loaded_is_said_so_and_tried_again(error):
    async def scenario(stage: Stage) -> None:
        stage.loader.failure = error
        requests = [asyncio.ensure_future(stage.table.hold("a")) for _ in range(2)]
        for request in requests:
            with pytest.raises(ApiError, match="a: it could not be loaded") as caught:
                await request
            assert (caught.value.status, caught.value.code) == (503, "model_not_loaded")
        assert stage.table.place("a").failure
        assert stage.table.place("a").num_users == 0
        stage.loader.failure = None
        await stage.use("a")
        assert not stage.table.place("a").failure

    assert run(scenario, Stage(room=1)).loader.done == ["+a"]


def test_requests_that_go_away_leave_no_model_in_use():
    async def scenario(stage: Stage) -> None:
        stage.loader.may_load.clear()
        early, late = (asyncio.ensure_future(stage.table.hold("a")) for _ in range(2))
        await turn()
        early.cancel()
        stage.loader.may_load.set()
        while not stage.table.places[0].served:
            await asyncio.sleep(0)
        late.cancel()  # it may just have been given the model
        await asyncio.gather(early, late, return_exceptions=True)
        await stage.settled()
        assert stage.table.places[0].num_users == 0
        await stage.use("b")

    assert run(scenario, Stage(room=1)).loader.done == ["+a", "-a", "+b"]


def test_a_request_that_leaves_the_queue_costs_no_model_its_place():
    async def scenario(stage: Stage) -> None:
        held = await stage.table.hold("a")
        gone = asyncio.ensure_future(stage.table.hold("b"))
        while not stage.table._is_short:
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await stage.settled()
        await stage.use("a")  # nobody waits for its memory any more
        stage.table.release(held)
        assert stage.statuses() == ["loaded", "unloaded", "unloaded"]
        await stage.use("b")

    assert run(scenario, Stage(room=1)).loader.done == ["+a", "-a", "+b"]
