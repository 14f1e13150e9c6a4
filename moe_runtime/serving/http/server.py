"""The state that all endpoints share: models, limits, metrics, the log, and readiness."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from pydantic_core import from_json, to_json

from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.serving.digest_files import DIGEST_BYTES, DigestFiles
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.http.api_errors import ApiError, shutting_down
from moe_runtime.serving.http.generating import AnswerChoice, Generation, too_slow
from moe_runtime.serving.http.metrics import Metrics, RequestTimes
from moe_runtime.serving.http.model_table import ModelTable
from moe_runtime.serving.http.schema import Message
from moe_runtime.serving.http.served_model import Place, ServedModel

Log = Callable[[str, Mapping[str, Any]], None]

ValueT = TypeVar("ValueT")

_BODIES_AT_ONCE = 4
"""Bodies of the greatest length that may be in memory at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one request.

    Attributes:
        head_seconds: from the beginning of the connection or the head to the end of the head.
        body_seconds: from the head to the end of the body.
        sending_seconds: while the client reads nothing.
        choices: sequences: ``n`` for each prompt.
        seconds: from the arrival to the end of the answer.
    """

    body_bytes: int = 1 << 20
    head_seconds: float = 60.0
    body_seconds: float = 60.0
    sending_seconds: float = 60.0
    choices: int = 256
    seconds: float = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Which requests are accepted.

    Attributes:
        keys: requests must have one of them; without keys every request is accepted.
        origins: origins of pages that may read answers in a browser; ``*`` for all.
        hosts: valid names of the server; None for any.
        shares_prefixes: requests with different keys share the prefix cache.
    """

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    hosts: Sequence[str] | None = None
    shares_prefixes: bool = False

    def owner_of(self, key: str) -> str:
        """The owner of prefixes and responses: a digest that does not reveal the key."""
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest() if self.keys else ""


@dataclass(slots=True, kw_only=True)
class RequestState:
    """A request while it is answered: ``scope["request_state"]`` of its connection.

    Attributes:
        client: number of its key, or its address; clients take turns.
        owner: finds its responses and grammars, and its prefixes unless these are shared.
        body_bytes: memory of its body and pictures that it holds now.
        place: of the model that it holds.
    """

    request_id: str
    deadline_s: float
    client: str = ""
    owner: str = ""
    body_bytes: int = 0
    user: str = ""
    place: Place | None = None
    generation: Generation | None = None
    failure: ApiError | None = None
    is_stream: bool = False

    @staticmethod
    def of(scope: Mapping[str, Any]) -> RequestState:
        return scope["request_state"]


_KEPT_BYTES = 64 << 20


class KeptResponses:
    """The latest responses and their conversations, by owner.

    They are in ``files``, where later servers find them. Without files, or if writing fails, they
    are in memory, up to ``most_bytes``. Thread-safe and slow: not for the event loop.
    """

    def __init__(self, files: DigestFiles | None = None, most_bytes: int = _KEPT_BYTES) -> None:
        self._files = files
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, owner: str, response: dict[str, Any], messages: Sequence[Message]) -> None:
        plain = to_json(messages, exclude_none=True)  # json would hold the GIL for longer
        kept = json.dumps(response).encode() + b"\n" + plain
        if self._files is not None:
            try:
                return self._files.write(_file(self._files, owner, response["id"]), kept)
            except OSError as error:
                self._files.failed(error)
        with self._lock:
            self._kept[owner, response["id"]] = kept
            self._num_bytes += len(kept)
            while self._num_bytes > self._most_bytes:
                self._num_bytes -= len(self._kept.popitem(last=False)[1])

    def response(self, owner: str, name: str) -> dict[str, Any]:
        return json.loads(self._find(owner, name, "response_id")[0])

    def conversation(self, owner: str, name: str) -> tuple[dict[str, Any], list[Message]]:
        """The response, and the messages up to its end."""
        response, messages = self._find(owner, name, "previous_response_id")
        return json.loads(response), [Message(**message) for message in from_json(messages)]

    def delete(self, owner: str, name: str) -> None:
        self._find(owner, name, "response_id")
        if self._files is not None:
            try:
                _file(self._files, owner, name).unlink(missing_ok=True)
            except OSError as error:
                message = f"the response cannot be removed from the disk: {error.strerror}"
                raise ApiError(message, status=500, code="internal_error") from None
        with self._lock:
            self._num_bytes -= len(self._kept.pop((owner, name), b""))

    def _find(self, owner: str, name: str, param: str) -> list[bytes]:
        """JSON of the response and of the messages."""
        found = self._kept.get((owner, name))
        if found is None and self._files is not None:
            file = _file(self._files, owner, name)
            data = self._files.read(file)
            found = None if data is None else data.numpy().tobytes()
            if found is not None:
                self._files.use([file])
        if found is None:
            # OpenAI's words and codes.
            is_before = param == "previous_response_id"
            what = "Previous response" if is_before else "Response"
            end = "it ends" if self._files is None else "others take their place"
            raise ApiError(
                f"{what} with id {clipped(name)} not found. This server keeps the latest, until "
                f"{end}{'; send the whole conversation as input' * is_before}",
                status=400 if is_before else 404,
                param=param,
                code=f"{what.lower().replace(' ', '_')}_not_found",
            )
        return found.split(b"\n", 1)


def _file(files: DigestFiles, owner: str, name: str) -> Path:
    key = json.dumps(["response", owner, name]).encode()
    return files.folder / hashlib.blake2b(key, digest_size=DIGEST_BYTES).hexdigest()


@dataclass(slots=True)
class Server:
    """The state of one server; the first model answers requests that name none.

    Attributes:
        is_divided: several processes hold the model.
        is_draining: new requests are refused.
        has_ended: running requests end with an error.
        num_body_bytes: memory of bodies and pictures, which go when the engine has the tokens.
    """

    models: ModelTable
    limits: Limits
    access: Access
    log: Log
    loads_adapters: bool = False
    is_divided: bool = False
    is_draining: bool = False
    has_ended: bool = False
    num_body_bytes: int = 0
    kept: KeptResponses = field(default_factory=KeptResponses)
    metrics: Metrics = field(init=False)
    # Tokenizers are slow with long texts, so they have a thread. Hostile grammars take seconds, so
    # requests with grammars have another one.
    worker: ThreadPoolExecutor = field(init=False)
    grammar_worker: ThreadPoolExecutor = field(init=False)
    _turns: tuple[ClientTurns, ClientTurns] = field(init=False)
    _arriving: set[asyncio.Timeout] = field(default_factory=set, init=False)
    _preparing: set[asyncio.Timeout] = field(default_factory=set, init=False)
    _generations: WeakSet[Generation] = field(default_factory=WeakSet, init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self._engines)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._turns = ClientTurns(), ClientTurns()
        self.grammar_worker = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def _engines(self) -> dict[str, Engine]:
        return {model.name: model.engine for model in self.models.values() if model.parent is None}

    def name_of(self, name: str | None) -> str:
        """The name of a served model; None for the first one."""
        names = self.models.names
        if name is not None and name not in names:
            raise ApiError(
                f"model: {clipped(name)} is not served here; there is {', '.join(names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return names[0] if name is None else name

    async def hold(self, state: RequestState, name: str | None) -> ServedModel:
        """Waits until a model is loaded; it stays loaded until the request ends."""
        if self.is_draining:
            raise shutting_down()
        name = self.name_of(name)
        late = too_slow(self.limits.seconds)
        async with self._until(state.deadline_s, self._preparing, late):
            state.place = await self.models.hold(name)
        if name not in state.place.served:  # an adapter was unloaded meanwhile
            self.name_of(name)
        return state.place.served[name]

    def release(self, state: RequestState) -> None:
        if state.place is not None:
            self.models.release(state.place)
            state.place = None

    @property
    def is_ready(self) -> bool:
        """Whether the server accepts requests, and all engines run."""
        return not self.is_draining and all(engine.is_open for engine in self._engines().values())

    @property
    def failure(self) -> Exception | None:
        """The error that ended the engine of a divided model."""
        return next(filter(None, (engine.failure for engine in self._engines().values())), None)

    def drain(self) -> None:
        """Refuses new requests, and those whose body has not arrived."""
        self.is_draining = True
        _expire(self._arriving)

    def arrival(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Limits the time in which a body may arrive within the block."""
        limit_s = min(self.limits.body_seconds, self.limits.seconds)
        late = ApiError(
            f"the body did not arrive within {limit_s:g} seconds",
            status=408,
            code="timeout",
            headers={"connection": "close"},
        )
        end_s = asyncio.get_running_loop().time() + limit_s
        return self._until(end_s, self._arriving, late)

    async def prepare(
        self,
        state: RequestState,
        work: Callable[..., ValueT],
        *args: Any,
        has_grammar: bool = False,
    ) -> ValueT:
        """Runs slow work in the thread for texts or for grammars.

        Clients take turns: a client with many requests delays others by one piece of work only.
        Work that has begun continues after the deadline, and its result is dropped.
        """
        worker = self.grammar_worker if has_grammar else self.worker
        if self.has_ended:
            raise shutting_down()
        late = too_slow(self.limits.seconds)
        async with (
            self._until(state.deadline_s, self._preparing, late),
            self._turns[has_grammar].turn(state.client),
        ):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(worker, partial(work, *args))

    @contextlib.asynccontextmanager
    async def _until(
        self, end_s: float, waiting: set[asyncio.Timeout], late: ApiError
    ) -> AsyncGenerator[None, None]:
        """A block with a deadline, which the server may bring forward (`_expire`)."""
        try:
            async with asyncio.timeout_at(end_s) as timeout:
                waiting.add(timeout)
                try:
                    yield
                finally:
                    waiting.discard(timeout)
        except TimeoutError:
            is_ending = self.is_draining if waiting is self._arriving else self.has_ended
            raise (shutting_down() if is_ending else late) from None

    def begin(
        self, state: RequestState, model: ServedModel, choices: Sequence[AnswerChoice]
    ) -> Generation:
        """Submits the sequences of a request to the engine."""
        times = RequestTimes(self.metrics, model.parent or model.name)
        owner = "" if self.access.shares_prefixes else state.owner
        for choice in choices:
            choice.request = replace(choice.request, client=state.client, prefix_owner=owner)
        generation = Generation(model, choices, times, self.limits.seconds, state.deadline_s)
        generation.submit()
        state.generation = generation
        self._generations.add(generation)
        return generation

    def hold_body(self, state: RequestState, num_bytes: int) -> None:
        """Counts memory of a body or its pictures; all requests together have a limit."""
        state.body_bytes += num_bytes
        self.num_body_bytes += num_bytes
        most = _BODIES_AT_ONCE * self.limits.body_bytes
        if self.num_body_bytes > max(most, state.body_bytes):
            raise ApiError(
                f"bodies of {most} bytes are being read, which is the limit; try again later",
                status=429,
                code="queue_full",
                headers={"retry-after": "1", "connection": "close"},
            )

    def forget_body(self, state: RequestState) -> None:
        self.num_body_bytes -= state.body_bytes
        state.body_bytes = 0

    def shut_down(self) -> None:
        """Ends all requests with an error."""
        self.has_ended = True
        _expire(self._preparing)
        for generation in list(self._generations):
            generation.shut_down()


class ClientTurns:
    """Runs one piece of work at a time; waiting clients take turns."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncGenerator[None, None]:
        if self._is_taken:
            ready = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(ready)
            try:
                await ready
            except asyncio.CancelledError:
                if not ready.cancelled():  # the turn was granted at the same moment
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            own = self._waiting.pop(client)
            ready = own.popleft()
            if own:
                self._waiting[client] = own  # after all others
            if not ready.done():
                ready.set_result(None)
                return
        self._is_taken = False


def _expire(timeouts: set[asyncio.Timeout]) -> None:
    for timeout in timeouts:
        if not timeout.expired():
            timeout.reschedule(0)
