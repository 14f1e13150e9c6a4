"""The endpoints: what is asked by which path, and what answers it."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import moe_runtime
from moe_runtime.serving.http import chat, completions
from moe_runtime.serving.http.answers.chat_answer import ChatAnswer
from moe_runtime.serving.http.api_errors import ApiError, FieldError
from moe_runtime.serving.http.asking import check_messages, check_tokens, encode_text
from moe_runtime.serving.http.completions import CompletionAnswer
from moe_runtime.serving.http.gate import given_key
from moe_runtime.serving.http.generating import AnswerChoice, Generation
from moe_runtime.serving.http.logged import MOST_USER
from moe_runtime.serving.http.models.chat_template import without_template
from moe_runtime.serving.http.models.served_model import ServedModel
from moe_runtime.serving.http.responding import (
    EventStream,
    client_went_away,
    json_response,
    whole,
)
from moe_runtime.serving.http.schema import (
    BodyT,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationFields,
    StreamOptions,
    TokenizeBody,
    parse_body,
)
from moe_runtime.serving.http.server import Server

_OF_MESSAGES = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_QUICK_BYTES = 1 << 14
"""Bodies up to here are read in the loop, within a millisecond or two; others would hold it up."""


class Endpoints:
    """Answers requests.

    Args:
        server: what the endpoints share.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._most_choices = server.limits.choices

    def routes(self) -> list[Route]:
        """All paths."""
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
        """Continues a conversation."""
        body = await self._body(request, ChatBody)
        model = self._server.model(body.model)
        plan = await self._server.aside(
            chat.prepare,
            body,
            model,
            self._most_choices,
            self._owner(request),
            client=self._client(request),
            deadline_s=request.scope["deadline_s"],
            has_grammar=body.response_format is not None or bool(body.tools),
        )
        generation = self._begin(request, body, model, plan.choices)
        body = body.without_texts()
        return await _answer(request, body, generation, ChatAnswer(body, generation, plan))

    async def complete(self, request: Request) -> Response:
        """Continues texts or tokens."""
        body = await self._body(request, CompletionBody)
        model = self._server.model(body.model)
        echoed, choices = await self._server.aside(
            completions.prepare,
            body,
            model,
            self._most_choices,
            self._owner(request),
            client=self._client(request),
            deadline_s=request.scope["deadline_s"],
            has_grammar=body.response_format is not None,
        )
        generation = self._begin(request, body, model, choices)
        body = body.without_texts()
        answer = CompletionAnswer(body, generation, echoed)
        return await _answer(request, body, generation, answer)

    async def models(self, request: Request) -> Response:
        """All models."""
        found = [_described(model) for model in self._server.models.values()]
        return json_response({"object": "list", "data": found})

    async def one_model(self, request: Request) -> Response:
        """One of them."""
        return json_response(_described(self._server.model(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or a conversation."""
        body = await self._body(request, TokenizeBody)
        model = self._server.model(body.model)
        ids = await self._server.aside(
            _tokens_of,
            body,
            model,
            client=self._client(request),
            deadline_s=request.scope["deadline_s"],
        )
        shown = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": model.engine.most_request_tokens,
            "token_strs": None,
        }
        if body.return_token_strs:
            tokenizer = model.vocabulary.tokenizer
            shown["token_strs"] = tokenizer.convert_ids_to_tokens(ids)
        return json_response(shown)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        body = await self._body(request, DetokenizeBody)
        model = self._server.model(body.model)
        if body.tokens:
            check_tokens(body.tokens, model, "tokens")
        text = await self._server.aside(
            model.vocabulary.decode,
            body.tokens,
            client=self._client(request),
            deadline_s=request.scope["deadline_s"],
        )
        return json_response({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """What a client needs to know of the tokenizer."""
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
        """Whether the server lives and whether it takes requests."""
        ready = self._server.is_ready
        return json_response({"alive": True, "ready": ready}, 200 if ready else 503)

    async def ping(self, request: Request) -> Response:
        """Whether the server lives."""
        return json_response({})

    async def metrics(self, request: Request) -> Response:
        """All metrics, in Prometheus' text format."""
        return Response(self._server.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:
        """The version of this program."""
        return json_response({"version": moe_runtime.__version__})

    async def page(self, request: Request) -> Response:
        """A page to chat and to watch."""
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

    def _client(self, request: Request) -> str:
        """Who takes turns with others: the number of a key, or an address where there are none."""
        keys = self._server.access.keys
        if keys:
            return str(keys.index(given_key(request)))
        return request.client.host if request.client else ""

    def _owner(self, request: Request) -> str:
        return self._server.access.owner_of(given_key(request))

    def _begin(
        self,
        request: Request,
        body: GenerationFields,
        model: ServedModel,
        choices: Sequence[AnswerChoice],
    ) -> Generation:
        deadline_s = request.scope["deadline_s"]
        if not (body.stays_large or any(one.request.constraint for one in choices)):
            request.scope["forget_body"]()
        owner = self._owner(request)
        return self._server.begin(model, choices, self._client(request), owner, deadline_s)

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
        is_quick = len(raw) <= _QUICK_BYTES
        read = partial(parse_body, kind, raw)
        deadline_s = request.scope["deadline_s"]
        if is_quick:
            body = read()
        else:
            client = self._client(request)
            body = await self._server.aside(read, client=client, deadline_s=deadline_s)
        if isinstance(body, GenerationFields):
            user = body.user or body.safety_identifier or ""
            request.scope["log"]["user"] = user[:MOST_USER]
            if body.stream_options is not None and not body.stream:
                raise FieldError("stream_options", "needs stream: true")
            _check_usage(body.stream_options)
        return body


AnswerT = TypeVar("AnswerT", CompletionAnswer, ChatAnswer)


async def _answer(
    request: Request, body: GenerationFields, generation: Generation, answer: AnswerT
) -> Response:
    request.scope["log"]["generation"] = generation
    if body.stream:
        return EventStream(generation, answer.chunks())
    return await whole(request, generation, answer.whole())


def _check_usage(options: StreamOptions | None) -> None:
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise FieldError("stream_options.continuous_usage_stats", "needs include_usage: true")


def _tokens_of(body: TokenizeBody, model: ServedModel) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "expected either prompt or messages")
    if body.messages is None:
        for name in _OF_MESSAGES:
            if getattr(body, name) is not None:
                raise FieldError(name, "needs messages")
        adds = body.add_special_tokens is not False
        return encode_text(body.prompt or "", model, "prompt", add_special_tokens=adds)
    if model.template is None:
        raise without_template(model.name)
    chat.check_continuation(body, body.messages)
    check_messages(body.messages, model)
    continues = bool(body.continue_final_message)
    prompt = model.template.render(
        body.messages,
        body.tools or (),
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=body.chat_template_kwargs,
    )
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
