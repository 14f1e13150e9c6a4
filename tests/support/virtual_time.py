"""An event loop whose clock goes on to what is due next, and a server that answers by it."""

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx2

T = TypeVar("T")
Part = tuple[float, bytes]
"""Seconds to wait, and what is sent then."""


class _Skipping(selectors.SelectSelector):
    """Adds what would be waited for to a clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is ever due: the program would wait for ever"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


def run_virtually(work: Callable[[], Awaitable[T]]) -> T:
    """Runs a coroutine to its end; what waits for seconds takes none."""
    selector = _Skipping()

    def new_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s
        return loop

    async def run() -> T:
        return await work()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(run())


class _Parts(httpx2.AsyncByteStream):
    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for wait_s, data in self._parts:
            await asyncio.sleep(wait_s)
            yield data


def events(*chunks: Any, waits_s: Sequence[float] = ()) -> list[Part]:
    """Chunks as server-sent events, each after its wait; a text is sent as it is."""
    texts = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
    waits = [*waits_s, *[0.0] * (len(texts) - len(waits_s))]
    return [(wait, f"data: {text}\n\n".encode()) for wait, text in zip(waits, texts, strict=True)]


def pieces(waits_s: Sequence[float], *, prompt_tokens: int = 5) -> list[Part]:
    """An answer of one token after each wait, with its usage, whole."""
    texts = [{"choices": [{"text": "word "}]} for _ in waits_s]
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts)}
    return events(*texts, {"choices": [], "usage": usage}, "[DONE]", waits_s=waits_s)


def scripted(
    script: Callable[[dict[str, Any]], Sequence[Part] | httpx2.Response],
) -> httpx2.AsyncClient:
    """Connections to a server that answers each body by a script, and has a model "scripted"."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/models"):
            return httpx2.Response(200, json={"data": [{"id": "scripted"}]})
        found = script(json.loads(request.content))
        if isinstance(found, httpx2.Response):
            return found
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, stream=_Parts(found))

    return httpx2.AsyncClient(
        transport=httpx2.MockTransport(answer), base_url="http://scripted/v1/"
    )
