"""The endpoints: paths, their handlers, and checks of every request."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.resources
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import moe_runtime
from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import MoERuntimeError, text_of
from moe_runtime.serving.http import chat, messages, responses
from moe_runtime.serving.http.api_errors import (
    ApiError,
    FieldError,
    internal_error,
    raised_as_api_error,
)
from moe_runtime.serving.http.generating import (
    Answers,
    Generation,
    Prepared,
    check_tokens,
    encode_text,
)
from moe_runtime.serving.http.messages import MessagesBody
from moe_runtime.serving.http.responses import ResponsesBody
from moe_runtime.serving.http.schema import (
    AdapterBody,
    AnswerBody,
    Body,
    BodyT,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationFields,
    ModelBody,
    TokenizeBody,
    TranslatedBody,
    known_place,
    parse_body,
)
from moe_runtime.serving.http.served_model import ServedModel
from moe_runtime.serving.http.server import RequestState, Server

_MESSAGES = "/v1/messages"
CLIENT_CLOSED_REQUEST = 499
"""Status in the log of a request whose client disconnected."""
ResultT = TypeVar("ResultT")
ModelledT = TypeVar("ModelledT", bound=AnswerBody | TokenizeBody | DetokenizeBody)


def client_went_away() -> ApiError:
    message = "the client went away"
    return ApiError(message, status=CLIENT_CLOSED_REQUEST, logged=message)


def json_bytes(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, media_type="application/json")


def error_response(error: ApiError, path: str) -> Response:
    is_of_anthropic = path.startswith(_MESSAGES)
    body = messages.error_body(error) if is_of_anthropic else error.body()
    return json_response(body, error.status, error.headers)


def _event(chunk: dict[str, Any]) -> bytes:
    """A server-sent event; the chunk's ``type`` is its name."""
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return name.encode() + b"data: " + json_bytes(chunk) + b"\n\n"


class EventStream(StreamingResponse):
    """Chunks as server-sent events; the generation ends when the client disconnects."""

    def __init__(self, generation: Generation, answers: Answers) -> None:
        self._generation = generation
        self._events = self._encoded(answers)
        super().__init__(
            self._events,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        RequestState.of(scope).is_stream = True
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()
            await self._events.aclose()

    async def _encoded(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        failure: ApiError | None = client_went_away()
        try:
            try:
                with raised_as_api_error():
                    async with contextlib.aclosing(answers.chunks()) as chunks:
                        async for chunk in chunks:
                            yield _event(chunk)
                failure = None
            except ApiError as error:
                # The traceback has this frame: a cycle that would keep the whole request.
                failure = error.with_traceback(None)
                failure.__context__ = None
                yield _event(answers.failed(error))
            yield answers.closing
        finally:
            self._generation.failure = failure


async def unless_gone(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Waits for work; cancels it if the client disconnects first."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise client_went_away()
    finally:
        for task in (working, gone):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


_QUICK_BYTES = 1 << 14
"""Longer bodies take over two milliseconds to parse, and are parsed outside the event loop."""
_PAGE = "/page/"
"""Folder of the page's files, which need no key."""
_PAGE_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PAGE_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class Endpoints:
    def __init__(self, server: Server) -> None:
        self._server = server

    def routes(self) -> list[Route]:
        get, post, answer = ["GET"], ["POST"], self._answer
        chats = partial(answer, kind=ChatBody, prepare=chat.prepare)
        respond = partial(responses.prepare, kept=self._server.kept)
        respond = partial(answer, kind=ResponsesBody, prepare=respond)
        complete = partial(answer, kind=CompletionBody, prepare=chat.prepare_completion)
        message = partial(answer, kind=MessagesBody, prepare=messages.prepare)
        return [
            # Some clients omit the version.
            *(Route(f"{at}/chat/completions", chats, methods=post) for at in ("/v1", "")),
            *(Route(f"{at}/responses", respond, methods=post) for at in ("/v1", "")),
            Route("/v1/completions", complete, methods=post),
            Route("/v1/responses/input_tokens", self.count_input, methods=post),
            Route("/v1/responses/{name}", self.one_response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{name}/cancel", self.cancel_response, methods=post),
            Route(_MESSAGES, message, methods=post),
            Route(f"{_MESSAGES}/count_tokens", self.count_tokens, methods=post),
            Route("/v1/models", self.models, methods=get),
            Route("/models", self.models, methods=get),
            Route("/models/load", self.load_model, methods=post),
            Route("/models/unload", self.unload_model, methods=post),
            Route("/v1/load_lora_adapter", self.load_adapter, methods=post),
            Route("/v1/unload_lora_adapter", self.unload_adapter, methods=post),
            Route("/v1/models/{name:path}", self.one_model, methods=get),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/tokenizer_info", self.tokenizer_info, methods=get),
            Route("/health", self.health, methods=get),
            Route("/ping", self.ping, methods=["GET", "POST"]),
            Route("/metrics", self.metrics, methods=get),
            Route("/version", self.version, methods=get),
            Route("/", self.page, methods=get),
            Route(f"{_PAGE}{{name}}", self.page, methods=get),
        ]

    async def one_response(self, request: Request) -> Response:
        name, owner = request.path_params["name"], RequestState.of(request.scope).owner
        if request.method == "DELETE":
            await asyncio.to_thread(self._server.kept.delete, owner, name)
            return json_response({"id": name, "object": "response.deleted", "deleted": True})
        return json_response(await asyncio.to_thread(self._server.kept.response, owner, name))

    async def cancel_response(self, request: Request) -> Response:
        name, owner = request.path_params["name"], RequestState.of(request.scope).owner
        await asyncio.to_thread(self._server.kept.response, owner, name)
        message = "Cannot cancel a synchronous response: it has ended, or its stream is closed"
        raise ApiError(message, code="invalid_value")

    async def count_tokens(self, request: Request) -> Response:
        return json_response(await self._count(request, MessagesBody, messages.chat_of))

    async def count_input(self, request: Request) -> Response:
        to_chat = partial(responses.chat_of, kept=self._server.kept)
        found = await self._count(request, ResponsesBody, to_chat)
        return json_response({"object": "response.input_tokens", **found})

    async def _count(
        self, request: Request, kind: type[TranslatedBody], to_chat: Callable[..., ChatBody]
    ) -> dict[str, int]:
        body, state, model = await self._begin(request, kind)
        work = chat.count_tokens, to_chat, body, model, state.owner
        return {"input_tokens": await self._server.prepare(state, *work)}

    async def models(self, request: Request) -> Response:
        found = [self._described(name) for name in self._server.models.names]
        return json_response({"object": "list", "data": found})

    async def one_model(self, request: Request) -> Response:
        name = self._server.name_of(request.path_params["name"])
        return json_response(self._described(name))

    async def load_model(self, request: Request) -> Response:
        body = await self._body(request, ModelBody)
        self._server.models.load(self._server.name_of(body.model))
        return json_response({"success": True})

    async def unload_model(self, request: Request) -> Response:
        body = await self._body(request, ModelBody)
        if self._server.is_divided:
            message = "model: its processes keep it until the server ends; it cannot be unloaded"
            raise ApiError(message, param="model")
        self._server.models.unload(self._server.name_of(body.model))
        return json_response({"success": True})

    async def load_adapter(self, request: Request) -> Response:
        body, models = await self._adapter_body(request), self._server.models
        name, state = body.lora_name, RequestState.of(request.scope)
        is_adapter = name in models.names and name != models.place(name).name
        if not body.lora_path:
            raise ApiError("lora_path: expected the folder of an adapter", param="lora_path")
        if name in models.names and not (is_adapter and body.load_inplace):
            said = "; set load_inplace to replace it" if is_adapter else ", a model"
            raise ApiError(f"lora_name: {name!r} is served already{said}", param="lora_name")
        base = body.base_model_name
        await self._server.hold(state, models.place(name).name if is_adapter else base)
        assert state.place is not None
        folder = Path(body.lora_path)
        try:
            await models.add_adapter(state.place, name, folder)
        except (MoERuntimeError, ValueError, OSError) as error:
            status = 400 if folder.is_dir() else 404
            said = f"lora_path: {text_of(error)}"
            raise ApiError(said, status=status, param="lora_path", code="bad_adapter") from None
        return Response(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        name, models = (await self._adapter_body(request)).lora_name, self._server.models
        if name not in models.names or name == models.place(name).name:
            message = f"lora_name: there is no adapter {clipped(name)}"
            raise ApiError(message, status=404, param="lora_name", code="adapter_not_found")
        models.remove_adapter(name)
        return Response(f"Success: LoRA adapter {name!r} removed successfully.")

    async def _adapter_body(self, request: Request) -> AdapterBody:
        if not self._server.loads_adapters:
            message = "adapters are loaded by servers that run with --allow-adapter-loading"
            raise ApiError(message, status=404, code="adapter_loading_is_off")
        return await self._body(request, AdapterBody)

    def _described(self, name: str) -> dict[str, Any]:
        place, model = self._server.models.place(name), self._server.models.get(name)
        status = {"value": place.status, **({"failed": True} if place.failure else {})}
        inputs = ["text", "image"] if place.takes_pictures else ["text"]
        return {
            "id": name,
            "object": "model",
            "created": place.created_s,
            "owned_by": "moe-runtime",
            "root": place.name,
            "parent": None if name == place.name else place.name,
            "max_model_len": None if model is None else model.engine.most_request_tokens,
            "status": status,
            "architecture": {"input_modalities": inputs, "output_modalities": ["text"]},
        }

    async def tokenize(self, request: Request) -> Response:
        body, state, model = await self._begin(request, TokenizeBody)
        ids = await self._server.prepare(state, _tokens_of, body, model)
        texts = None
        if body.return_token_strs:
            texts = model.vocabulary.tokenizer.convert_ids_to_tokens(ids)
        most = model.engine.most_request_tokens
        return json_response(
            {"tokens": ids, "count": len(ids), "max_model_len": most, "token_strs": texts}
        )

    async def detokenize(self, request: Request) -> Response:
        body, state, model = await self._begin(request, DetokenizeBody)
        if body.tokens:
            check_tokens(body.tokens, model, "tokens")
        text = await self._server.prepare(state, model.vocabulary.decode, body.tokens)
        return json_response({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        model = await self._hold(request, request.query_params.get("model"))
        tokenizer = model.vocabulary.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return json_response(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": model.vocabulary.size,
                "model_max_length": model.engine.most_request_tokens,
                **{name: getattr(tokenizer, name) for name in names},
            }
        )

    async def health(self, request: Request) -> Response:
        ready = self._server.is_ready
        return json_response({"alive": True, "ready": ready}, 200 if ready else 503)

    async def ping(self, request: Request) -> Response:
        return json_response({})

    async def metrics(self, request: Request) -> Response:
        text = self._server.metrics.text
        # A divided model waits for the reports of other processes.
        found = await asyncio.to_thread(text) if self._server.is_divided else text()
        return Response(found, media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:
        return json_response({"version": moe_runtime.__version__})

    async def page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        folder = importlib.resources.files("moe_runtime.serving.http") / "page"
        found = next((file for file in folder.iterdir() if file.name == name), None)
        if found is None:
            raise HTTPException(404)
        kind = _PAGE_KINDS[name.rpartition(".")[2]]
        return Response(
            found.read_bytes(),
            media_type=f"{kind}; charset=utf-8",
            headers={"content-security-policy": _PAGE_POLICY, "cache-control": "no-cache"},
        )

    async def _answer(
        self, request: Request, kind: type[AnswerBody], prepare: Callable[..., Prepared]
    ) -> Response:
        # The body is freed before the answer is made: no variable here refers to it.
        answer, is_stream = await self._prepare(request, kind, prepare)
        if is_stream:
            return EventStream(answer.generation, answer)
        try:
            return json_response(await unless_gone(request, answer.whole()))
        finally:
            answer.generation.cancel()

    async def _prepare(
        self, request: Request, kind: type[AnswerBody], prepare: Callable[..., Prepared]
    ) -> tuple[Answers, bool]:
        """Hands a request to the engine; returns its answers and whether they are streamed."""
        body, state, model = await self._begin(request, kind)
        most = self._server.limits.choices
        choices, answers_of = await self._server.prepare(
            state, prepare, body, model, most, state.owner, has_grammar=body.may_have_grammar
        )
        if not (body.stays_large or any(one.request.constraint for one in choices)):
            self._server.forget_body(state)
        pictures = [one.picture for one in choices[0].request.pictures]
        self._server.hold_body(state, sum(picture.num_bytes for picture in pictures))
        answers = answers_of(self._server.begin(state, model, choices))
        return answers, bool(body.stream)

    async def _begin(
        self, request: Request, kind: type[ModelledT]
    ) -> tuple[ModelledT, RequestState, ServedModel]:
        """Reads a body, and waits for the model that it names."""
        body = await self._body(request, kind)
        return body, RequestState.of(request.scope), await self._hold(request, body.model)

    async def _hold(self, request: Request, name: str | None) -> ServedModel:
        """Waits until the model is loaded; stops when the client disconnects."""
        return await unless_gone(request, self._server.hold(RequestState.of(request.scope), name))

    async def _body(self, request: Request, kind: type[BodyT]) -> BodyT:
        media = request.headers.get("content-type", "").partition(";")[0].strip()
        if media.lower() != "application/json":
            raise ApiError(
                f"the body must be application/json, got {media[:100]!r}; give the header "
                "content-type: application/json",
                status=415,
            )
        if encoding := request.headers.get("content-encoding"):
            raise ApiError(
                f"the body must be plain, got the content-encoding {encoding[:100]!r}", status=415
            )
        try:
            async with self._server.arrival():
                raw = b"".join([part async for part in request.stream()])
        except ClientDisconnect:
            raise client_went_away() from None
        state = RequestState.of(request.scope)
        if len(raw) <= _QUICK_BYTES:
            body = parse_body(kind, raw)
        else:
            body = await self._server.prepare(state, parse_body, kind, raw)
        given: Body = body
        if isinstance(given, AnswerBody):
            state.user = (given.client_user or "")[:_MOST_USER]
        if isinstance(given, GenerationFields) and given.stream_options and not given.stream:
            raise FieldError("stream_options", "needs stream: true")
        return body


def _tokens_of(body: TokenizeBody, model: ServedModel) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "expected either prompt or messages")
    if body.messages is None:
        of_chats = ("tools", "add_generation_prompt", "continue_final_message")
        for name in (*of_chats, "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise FieldError(name, "needs messages")
        adds = body.add_special_tokens is not False
        return encode_text(body.prompt or "", model, "prompt", add_special_tokens=adds)
    prompt, _ = chat.prompt_of(body, model)
    adds = bool(body.add_special_tokens)
    return encode_text(prompt, model, "messages", add_special_tokens=adds)


def make_app(server: Server) -> ASGIApp:
    routes = Endpoints(server).routes()
    kinds = (ApiError, HTTPException, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _failed))
    app.router.redirect_slashes = False
    return RequestGate(app, server, frozenset(route.path for route in routes))


def _failed(request: Request, error: Exception) -> Response:
    path = request.scope["path"]
    if isinstance(error, HTTPException):
        known = "see /v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages"
        error = ApiError(
            f"{request.method} {path[:200]}: {error.detail}; {known}",
            status=error.status_code,
            code="unknown_url",
            headers=dict(error.headers or {}),
        )
    found = error if isinstance(error, ApiError) else internal_error(error)
    RequestState.of(request.scope).failure = found
    return error_response(found, path)


_MOST_USER = 100
_OPEN_PATHS = frozenset({"/", "/health", "/ping"})
_CLOSING = {"connection": "close"}
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(:[0-9]*)?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_QUIET_PATHS = frozenset({"/health", "/ping", "/metrics", "/models", f"{_PAGE}{{name}}"})


class RequestGate:
    """Checks requests, and logs and counts their responses.

    Metrics use the names of ``paths`` alone.
    """

    def __init__(self, app: ASGIApp, server: Server, paths: Collection[str] = ()) -> None:
        self._app = app
        self._server = server
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started_s = time.perf_counter()
        request = Request(scope, receive)
        origin, origins = request.headers.get("origin"), self._server.access.origins
        if origin not in origins and "*" not in origins:
            origin = None
        status = CLIENT_CLOSED_REQUEST
        end_s = asyncio.get_running_loop().time() + self._server.limits.seconds
        state = scope["request_state"] = RequestState(
            request_id=_request_id(request), deadline_s=end_s
        )

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", state.request_id.encode())
                message["headers"] = [*message.get("headers", ()), own]
                if origin:
                    shared = (b"access-control-allow-origin", origin.encode("latin-1"))
                    message["headers"] += [shared, (b"vary", b"origin")]
            try:
                async with asyncio.timeout(self._server.limits.sending_seconds):
                    await send(message)
            except TimeoutError:
                problem = "the client does not read the answer"
                state.failure = ApiError(problem, status=CLIENT_CLOSED_REQUEST, logged=problem)
                raise ConnectionError(problem) from None

        async def receive_some() -> Message:
            message, most = await receive(), self._server.limits.body_bytes
            self._server.hold_body(state, len(message.get("body", b"")))
            if state.body_bytes > most:
                raise _too_long(most)
            return message

        try:
            refused = self._refusal(request, origin, state)
            if isinstance(refused, ApiError):
                refused = error_response(refused, scope["path"])
            if refused is not None:
                await refused(scope, receive, answer)
            else:
                await self._app(scope, receive_some, answer)
        finally:
            self._server.release(state)
            self._server.forget_body(state)
            self._record(request, status, state, time.perf_counter() - started_s)

    def _refusal(
        self, request: Request, origin: str | None, state: RequestState
    ) -> ApiError | Response | None:
        access, most = self._server.access, self._server.limits.body_bytes
        host = request.headers.get("host", "").lower()
        if found := _HOST.fullmatch(host):
            host = found[1]
        if access.hosts is not None and host and host not in access.hosts:
            # DNS rebinding: a page of another site whose name leads here. Browsers send a host.
            message = "this name of the server is not known; use its address"
            return ApiError(message, status=403, code="unknown_host")
        if request.method == "OPTIONS" and origin:
            # Allows all headers: OpenAI's client sends several of its own.
            plain = "authorization, content-type"
            allowed = request.headers.get("access-control-request-headers", plain)
            headers = {"access-control-allow-methods": "GET, POST"}
            headers |= {"access-control-allow-headers": allowed, "access-control-max-age": "600"}
            return Response(status_code=204, headers=headers)
        if {"content-length", "transfer-encoding"} <= set(request.headers):
            # Request smuggling: a proxy may see another end of the body.
            problem = "expected content-length or transfer-encoding, got both"
            return ApiError(problem, code="two_lengths", headers=_CLOSING)
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > most:
            return _too_long(most)
        state.client = request.client.host if request.client else ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else scheme
        key = key.strip() or request.headers.get("x-api-key", "").strip()
        path = request.scope["path"]
        if access.keys and path not in _OPEN_PATHS and not path.startswith(_PAGE):
            # Compares all keys, in constant time.
            same = [hmac.compare_digest(key.encode(), known.encode()) for known in access.keys]
            if not any(same):
                message = "expected one of the server's keys: Authorization: Bearer KEY"
                headers = {"www-authenticate": "Bearer"}
                return ApiError(message, status=401, code="invalid_api_key", headers=headers)
            state.client = str(same.index(True))
        state.owner = access.owner_of(key)
        return None

    def _record(self, request: Request, status: int, state: RequestState, seconds: float) -> None:
        route, path = request.scope.get("route"), request.scope["path"]
        path = getattr(route, "path", path if path in self._paths else "other")
        generation, failure = state.generation, state.failure
        if generation is not None and generation.failure is not None:
            # The stream began with status 200.
            status = generation.failure.status
            failure = failure or generation.failure
        self._server.metrics.responses.labels(path, str(status)).inc()
        fields: dict[str, Any] = {
            "method": request.method,
            "path": request.scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 4),
            "id": state.request_id,
        }
        if generation is not None:
            usage = generation.usage
            fields |= {
                "model": generation.model.name,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "new_tokens": usage.completion_tokens,
                "finish": ",".join(generation.finish_reasons) or "none",
            }
        if state.user:
            fields["user"] = state.user
        if failure is not None:
            fields |= log_fields(failure)
        if status >= 400 or path not in _QUIET_PATHS:
            self._server.log("request", fields)


def log_fields(error: ApiError) -> dict[str, Any]:
    """The code of an error, and the known part of the field at fault.

    Messages and unknown names quote the request, which the log must not show.
    """
    fields = {"error": error.logged or error.code or error.kind}
    place = known_place(error.param or "")
    return {**fields, "param": place} if place else fields


def _too_long(most: int) -> ApiError:
    message = f"the body is longer than {most} bytes (serve --max-body)"
    return ApiError(message, status=413, code="body_too_long", headers=_CLOSING)


def _request_id(request: Request) -> str:
    """The client's id of the request if it is fit for a log, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
