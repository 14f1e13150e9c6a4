"""The endpoints: what is asked by which path, and what answers it."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import moe_runtime
from moe_runtime.serving.http import chat, completions
from moe_runtime.serving.http.answering import Plan
from moe_runtime.serving.http.api_errors import ApiError, FieldError, internal_error
from moe_runtime.serving.http.asking import check_tokens, encode_text
from moe_runtime.serving.http.gate import RequestGate
from moe_runtime.serving.http.responding import (
    EventStream,
    client_went_away,
    error_response,
    json_response,
    whole,
)
from moe_runtime.serving.http.schema import (
    BodyT,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationFields,
    TokenizeBody,
    parse_body,
)
from moe_runtime.serving.http.served_model import ServedModel
from moe_runtime.serving.http.server import Asked, Server

_OF_MESSAGES = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_QUICK_BYTES = 1 << 14
"""Bodies up to here are read in the loop, within a millisecond or two; others would hold it up."""
_MOST_USER = 100
"""Characters in the log of the name that a client gives its user."""


class Endpoints:
    def __init__(self, server: Server) -> None:
        self._server = server

    def routes(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/completions", self.complete, methods=post),
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{name:path}", self.one_model, methods=get),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/tokenizer_info", self.tokenizer_info, methods=get),
            Route("/health", self.health, methods=get),
            Route("/ping", self.ping, methods=["GET", "POST"]),
            Route("/metrics", self.metrics, methods=get),
            Route("/version", self.version, methods=get),
            Route("/", self.page, methods=get),
        ]

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody, chat.prepare)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, completions.prepare)

    async def models(self, request: Request) -> Response:
        found = [_described(model) for model in self._server.models.values()]
        return json_response({"object": "list", "data": found})

    async def one_model(self, request: Request) -> Response:
        return json_response(_described(self._server.model(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeBody)
        model = self._server.model(body.model)
        ids = await self._server.prepare(Asked.of(request.scope), _tokens_of, body, model)
        texts = None
        if body.return_token_strs:
            texts = model.vocabulary.tokenizer.convert_ids_to_tokens(ids)
        most = model.engine.most_request_tokens
        return json_response(
            {"tokens": ids, "count": len(ids), "max_model_len": most, "token_strs": texts}
        )

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeBody)
        model = self._server.model(body.model)
        if body.tokens:
            check_tokens(body.tokens, model, "tokens")
        asked = Asked.of(request.scope)
        text = await self._server.prepare(asked, model.vocabulary.decode, body.tokens)
        return json_response({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        model = self._server.model(request.query_params.get("model"))
        tokenizer = model.vocabulary.tokenizer
        return json_response(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": model.vocabulary.size,
                "model_max_length": model.engine.most_request_tokens,
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "pad_token": tokenizer.pad_token,
                "unk_token": tokenizer.unk_token,
                "chat_template": tokenizer.chat_template,
            }
        )

    async def health(self, request: Request) -> Response:
        ready = self._server.is_ready
        return json_response({"alive": True, "ready": ready}, 200 if ready else 503)

    async def ping(self, request: Request) -> Response:
        return json_response({})

    async def metrics(self, request: Request) -> Response:
        return Response(self._server.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:
        return json_response({"version": moe_runtime.__version__})

    async def page(self, request: Request) -> Response:
        text = (
            importlib.resources.files("moe_runtime.serving.http").joinpath("page.html").read_bytes()
        )
        return Response(
            text,
            media_type="text/html; charset=utf-8",
            headers={
                "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
                "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
                "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
            },
        )

    async def _answer(
        self,
        request: Request,
        kind: type[ChatBody] | type[CompletionBody],
        prepare: Callable[..., Plan],
    ) -> Response:
        body = await self._body(request, kind)
        asked, model = Asked.of(request.scope), self._server.model(body.model)
        most = self._server.limits.choices
        plan = await self._server.prepare(
            asked, prepare, body, model, most, asked.owner, has_grammar=body.may_have_grammar
        )
        if not (body.stays_large or any(one.request.constraint for one in plan.choices)):
            self._server.forget_body(asked)
        generation = self._server.begin(asked, model, plan.choices)
        body = body.without_texts()  # the whole body goes while the answer is made
        answer = plan.answer(body, generation)
        if body.stream:
            return EventStream(generation, answer.chunks())
        return await whole(request, generation, answer.whole())

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
        asked = Asked.of(request.scope)
        if len(raw) <= _QUICK_BYTES:
            body = parse_body(kind, raw)
        else:
            body = await self._server.prepare(asked, parse_body, kind, raw)
        _note_common(asked, body)
        return body


def _note_common(asked: Asked, body: object) -> None:
    """What requests for answers have in common: a user, and options of streams."""
    if not isinstance(body, GenerationFields):
        return
    asked.user = (body.user or body.safety_identifier or "")[:_MOST_USER]
    options = body.stream_options
    if options is not None and not body.stream:
        raise FieldError("stream_options", "needs stream: true")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        field = "stream_options.continuous_usage_stats"
        raise FieldError(field, "needs include_usage: true")


def _tokens_of(body: TokenizeBody, model: ServedModel) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "expected either prompt or messages")
    if body.messages is None:
        for name in _OF_MESSAGES:
            if getattr(body, name) is not None:
                raise FieldError(name, "needs messages")
        adds = body.add_special_tokens is not False
        return encode_text(body.prompt or "", model, "prompt", add_special_tokens=adds)
    variables = body.chat_template_kwargs
    prompt = chat.prompt_of(body, body.messages, body.tools or (), model, variables)
    adds = bool(body.add_special_tokens)
    return encode_text(prompt, model, "messages", add_special_tokens=adds)


def _described(model: ServedModel) -> Mapping[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "moe-runtime",
        "root": model.parent or model.name,
        "parent": model.parent,
        "max_model_len": model.engine.most_request_tokens,
    }


def make_app(server: Server) -> ASGIApp:
    """An ASGI application that answers requests to a server."""

    def failed(request: Request, error: Exception) -> Response:
        api_error = _as_api_error(request, error)
        Asked.of(request.scope).failure = api_error
        return error_response(api_error)

    routes = Endpoints(server).routes()
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: failed,
            HTTPException: failed,
            Exception: failed,
        },
    )
    app.router.redirect_slashes = False
    return RequestGate(app, server, frozenset(route.path for route in routes))


def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        asked = f"{request.method} {request.scope['path'][:200]}"
        known = "see /v1/models, /v1/completions, /v1/chat/completions, /metrics"
        return ApiError(
            f"{asked}: {error.detail}; {known}",
            status=error.status_code,
            code="unknown_url",
            headers=dict(error.headers or {}),
        )
    return internal_error(error)
