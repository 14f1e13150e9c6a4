"""``/v1/chat/completions``: what a request asks and its pictures, made ready for the engine."""

from __future__ import annotations

import dataclasses
import itertools
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import MoERuntimeError, blamed_on
from moe_runtime.inference.pictures import (
    MOST_BYTES,
    MOST_PICTURES,
    Picture,
    PictureError,
    bytes_of_data_url,
    place,
)
from moe_runtime.serving.http import grammars
from moe_runtime.serving.http.answer_text import (
    HARMONY_MARKS,
    AnswerSections,
    AnswerToken,
    HarmonySections,
    Piece,
)
from moe_runtime.serving.http.api_errors import ApiError, FieldError, too_long, unsupported
from moe_runtime.serving.http.generating import (
    AnswerChoice,
    ChoiceAnswers,
    Generation,
    Prepared,
    Sections,
    chat_logprobs,
    check_choices,
    check_tokens,
    choices_for,
    encode_text,
)
from moe_runtime.serving.http.schema import (
    AllowedTools,
    ChatBody,
    Function,
    ImagePart,
    Message,
    NamedTool,
    TokenizeBody,
    Tool,
    TranslatedBody,
    named,
)
from moe_runtime.serving.http.served_model import ChatTemplate, ServedModel
from moe_runtime.serving.http.tool_formats import ParsedCall, ToolFormat

_FETCH_S = 10.0
"""For the addresses of a request together: texts of all other requests wait meanwhile."""
_PART_BYTES = 1 << 16
_MOST_SHOWN = 60


def pictures_of(messages: Sequence[Message], model: ServedModel) -> list[Picture]:
    """The pictures of a conversation, in their order; a `FieldError` names one that is none."""
    found, most = [], model.engine.most_request_tokens
    end_s = time.monotonic() + _FETCH_S
    for at, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else ()
        for number, part in enumerate(parts):
            if not isinstance(part, ImagePart):
                continue
            place = f"messages.{at}.content.{number}.image_url"
            if model.pictures is None:
                raise unsupported(place, "this model takes no pictures; leave them out")
            if message.role != "user":
                raise FieldError(place, f"may be in a message of the user, got {message.role}")
            if len(found) == MOST_PICTURES:
                raise FieldError(place, f"a request may have {MOST_PICTURES} pictures")
            try:
                data = _bytes_of(part.image_url.url, place, model, end_s)
                found.append(model.pictures.read(data))
            except PictureError as error:
                raise FieldError(place, str(error)) from None
            except MoERuntimeError as error:  # of the checkpoint, or of this installation
                raise unsupported(place, str(error)) from None
            num_tokens = sum(len(picture.ids) for picture in found)
            if num_tokens > most:  # before memory is taken for more of them
                raise too_long(f"{num_tokens} tokens of pictures", most, "messages")
    return found


def _bytes_of(url: str, place: str, model: ServedModel, end_s: float) -> bytes:
    if url.startswith("data:"):
        return bytes_of_data_url(url)
    if not url.startswith(("http://", "https://")):
        raise FieldError(place, f"expected a data URL, got {clipped(url)}")
    if not model.fetches_pictures:
        raise FieldError(
            place,
            "this server fetches no pictures: send a data URL, or start it with "
            "--allow-remote-images",
        )
    with (
        blamed_on(f"cannot fetch {url[:_MOST_SHOWN]}", PictureError),
        urllib.request.urlopen(url, timeout=_FETCH_S) as answer,
    ):
        data = bytearray()
        while len(data) <= MOST_BYTES and (part := answer.read1(_PART_BYTES)):
            data += part
            if time.monotonic() > end_s:
                raise TimeoutError(f"not whole after {_FETCH_S:g} s")
        return bytes(data)


def prepare(body: ChatBody, model: ServedModel, most_choices: int, owner: str = "") -> Prepared:
    """What the engine is asked. Takes a while: not in the loop."""
    choices, sections = prepare_parts(body, model, most_choices, owner)
    return choices, partial(ChatAnswers, sections=sections)


def prepare_parts(
    body: ChatBody, model: ServedModel, most_choices: int, owner: str, *, fits: bool = False
) -> tuple[list[AnswerChoice], list[Sections]]:
    """What the engine is asked, and what splits the text of each answer.

    With ``fits`` an answer may be as long as there is room, where more tokens are asked for.
    """
    check_choices(body, 1, most_choices)
    template = template_of(model)
    _check_combinations(body)
    tools = _tools_in_use(body)
    if tools and template.tools is None and not template.is_harmony:
        raise unsupported("tools", "this model's way of calling them is not known")
    prompt, pictures = prompt_of(body, body.messages, tools, model, _variables(body, template))
    ids = encode_text(prompt, model, "messages", add_special_tokens=False)
    check_tokens(ids, model, "messages")
    functions = _callable(body, tools)
    tokens = model.vocabulary.mark_tokens
    how = _format_of_calls(body, template) if functions else None
    grammar = _grammar(body, template, functions, tokens)
    if grammar is not None:
        grammar = _after_thoughts(grammar, body, template, tokens, how, prompt)
    given = body.max_completion_tokens
    most_new = body.max_tokens if given is None else given
    if fits and most_new is not None:
        most_new = min(most_new, max(model.engine.most_request_tokens - len(ids), 1))
    choices = choices_for(
        body,
        model,
        [ids],
        pictures=place(ids, pictures),
        max_tokens=most_new,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        matcher=grammar and _compiled(*grammar, functions, body, model, owner),
        shown_tokens=_shown_tokens(template, tokens, how),
    )
    if body.continue_final_message:
        for choice in choices:
            choice.text.follow(ids, is_whole=True)
    begins_with = "reasoning" if template.opens_reasoning(prompt) else "content"
    sections: list[Sections] = [
        HarmonySections(functions, prompt)
        if template.is_harmony
        else AnswerSections(template.reasoning, how, functions, begins_with)
        for _ in choices
    ]
    return choices, sections


def _format_of_calls(body: ChatBody, template: ChatTemplate) -> ToolFormat | None:
    """How calls are written where the model may write any.

    JSON that a response format asks for is the answer; a grammar of one's own may be of calls.
    """
    kind = (body.response_format or {}).get("type", "text")
    if template.tools is None or kind in ("json_object", "json_schema"):
        return None
    return template.tools if kind == "text" else dataclasses.replace(template.tools, bare=None)


def _check_combinations(body: ChatBody) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise FieldError("top_logprobs", "needs logprobs: true")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise FieldError("max_tokens", "is the old name of max_completion_tokens; give one")
    if body.tool_choice not in (None, "none") and not body.tools:
        raise FieldError("tool_choice", "needs tools")


def template_of(model: ServedModel) -> ChatTemplate:
    if model.template is None:
        name = model.parent or model.name
        raise ApiError(
            f"model: {name} has no chat template; use /v1/completions, or give serve a model that "
            "was trained for conversations",
            param="model",
            code="unsupported_model",
        )
    return model.template


def prompt_of(
    body: ChatBody | TokenizeBody,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    model: ServedModel,
    variables: Mapping[str, Any] | None,
) -> tuple[str, list[Picture]]:
    """A conversation as the model's chat template writes it, and its pictures."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise FieldError("continue_final_message", "excludes add_generation_prompt")
    if continues and messages[-1].role != "assistant":
        raise FieldError("continue_final_message", "needs a last message of the assistant")
    most = model.engine.most_request_tokens
    if len(messages) > most:  # surely too long, before its template is rendered
        raise too_long(f"{len(messages)} messages", most, "messages")
    pictures = pictures_of(messages, model)
    prompt = template_of(model).render(
        messages,
        tools,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=variables,
    )
    if model.pictures is None or not pictures:
        return prompt, []
    try:
        return model.pictures.write(prompt, pictures), pictures
    except PictureError as error:
        raise FieldError("messages", str(error)) from None


def count_tokens(
    to_chat: Callable[..., ChatBody], body: TranslatedBody, model: ServedModel, owner: str
) -> int:
    """Tokens of the prompt that a conversation makes."""
    with named(body.names):
        asked = to_chat(body, model, owner)
        variables = asked.chat_template_kwargs
        prompt, _ = prompt_of(asked, asked.messages, asked.tools or (), model, variables)
        return model.vocabulary.count(prompt, model.engine.most_request_tokens)


def _tools_in_use(body: ChatBody) -> list[Tool]:
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise FieldError("tools", "two functions have the same name")
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        if name not in names:
            raise FieldError("tool_choice.function.name", f"is none of the tools: {clipped(name)}")
        return [tool for tool in tools if tool.function.name == name]
    return [] if body.tool_choice == "none" else tools


def _callable(body: ChatBody, tools: Sequence[Tool]) -> list[Function]:
    """The functions that may be called, of those that the model is shown."""
    functions = [tool.function for tool in tools]
    if not isinstance(body.tool_choice, AllowedTools):
        return functions
    allowed = {tool.function.name for tool in body.tool_choice.allowed_tools.tools}
    if unknown := allowed - {function.name for function in functions}:
        problem = f"is none of the tools: {clipped(min(unknown))}"
        raise FieldError("tool_choice.allowed_tools.tools", problem)
    return [function for function in functions if function.name in allowed]


def _compiled(
    grammar: str,
    param: str,
    functions: Sequence[Function],
    body: ChatBody,
    model: ServedModel,
    owner: str,
) -> Any:
    """An error names the function that cannot be enforced, where it is one alone."""
    try:
        return model.grammars.compile(grammar, param, owner)
    except FieldError:
        for at, tool in enumerate(body.tools or ()):
            if (one := tool.function).is_strict and one in functions:
                place = one.place or f"tools.{at}.function.parameters"
                model.grammars.compile(grammars.of_function(one), place, owner)
        raise


def _variables(body: ChatBody, template: ChatTemplate) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if body.verbosity is not None and template.knows("verbosity"):
        variables["verbosity"] = body.verbosity
    if body.reasoning_effort is not None:
        if not template.knows("reasoning_effort"):
            raise unsupported("reasoning_effort", "this model's chat template knows none")
        variables["reasoning_effort"] = body.reasoning_effort
    return variables


def _shown_tokens(
    template: ChatTemplate, tokens: Mapping[str, int], how: ToolFormat | None
) -> tuple[str, ...]:
    """Special tokens that the answer is searched for."""
    if template.is_harmony:
        return HARMONY_MARKS
    reasoning = template.reasoning
    marks = () if reasoning is None else (reasoning.opens, reasoning.closes)
    marks = (*marks, *(() if how is None else how.shown_tokens))
    return tuple(token for token in tokens if any(token in mark for mark in marks))


def _grammar(
    body: ChatBody, template: ChatTemplate, functions: list[Function], tokens: Mapping[str, int]
) -> tuple[str, str] | None:
    """The grammar that the answer keeps to and the field that asks for it."""
    needs_call, is_bounded = _needs_call(body), isinstance(body.tool_choice, AllowedTools)
    asked = body.response_format
    param = "response_format"
    grammar = None if asked is None else grammars.of_response_format(asked)
    is_strict = any(function.is_strict for function in functions)
    # In channels a call ends the answer: there is one at most.
    is_alone = body.parallel_tool_calls is False and not template.is_harmony
    if functions and (needs_call or is_bounded or is_strict or is_alone):
        if grammar is not None:
            raise FieldError("response_format", "cannot be combined with tools that are enforced")
        param = "tools" if is_strict else "parallel_tool_calls"
        param = "tool_choice" if needs_call or is_bounded else param
        if template.tools is None:
            grammar = grammars.of_harmony_call(functions, is_needed=needs_call)
        else:
            grammar = grammars.of_tools(
                functions,
                template.tools,
                tokens,
                is_needed=needs_call,
                may_repeat=body.parallel_tool_calls is not False
                and not isinstance(body.tool_choice, NamedTool),
            )
    return None if grammar is None else (grammar, param)


def _needs_call(body: ChatBody) -> bool:
    choice = body.tool_choice
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
    return mode == "required" or isinstance(choice, NamedTool)


def _after_thoughts(
    grammar: tuple[str, str],
    body: ChatBody,
    template: ChatTemplate,
    tokens: Mapping[str, int],
    how: ToolFormat | None,
    prompt: str,
) -> tuple[str, str] | None:
    """The grammar where reasoning may come first; none for the rest of a message that has begun."""
    text, param = grammar
    is_own = (body.response_format or {}).get("type") == "grammar"
    if template.is_harmony:
        if HarmonySections(prompt=prompt).is_within_message:
            if param != "response_format" and not _needs_call(body):
                raise unsupported(param, "cannot be enforced in a message that has begun")
            return grammar
        if is_own:
            problem = "a grammar of one's own cannot follow this model's analysis"
            raise FieldError(param, problem)
        return grammars.after_analysis(text, is_call=param != "response_format"), param
    marks, is_open = template.reasoning, template.opens_reasoning(prompt)
    if marks is None or template.closes_reasoning(prompt) or (is_own and not is_open):
        return grammar
    if is_own:
        raise FieldError(param, "a grammar of one's own cannot follow reasoning; turn it off")
    opens = () if how is None else how.opens
    text = grammars.after_reasoning(text, marks, tokens, is_open=is_open, opens_calls=opens)
    return text, param


class ChatAnswers(ChoiceAnswers):
    def __init__(
        self,
        body: ChatBody,
        generation: Generation,
        sections: Sequence[Sections],
    ) -> None:
        kind = "chat.completion", "chat.completion.chunk"
        super().__init__(body, generation, kind, "chatcmpl")
        self._has_logprobs = bool(body.logprobs)
        self._sections = sections
        self._num_calls = [0] * len(sections)
        self._messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": None} for _ in sections
        ]
        self._silent = set(range(len(sections)))

    def take(self, index: int, piece: Piece) -> str | None:
        message = self._messages[index]
        for delta in self._deltas(index, piece):
            for field, value in delta.items():
                message[field] = value if message.get(field) is None else message[field] + value
        return self._reason(index, piece)

    def taken(self) -> dict[str, Any]:
        choices = []
        for index, message in enumerate(self._messages):
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            for call in message.get("tool_calls", ()):
                del call["index"]
            found = {"message": message}, self.tokens[index], self.reasons[index]
            choices.append(self._choice(index, *found))
        return {"choices": choices, **self._prompt_ids(0)}

    def grown(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks of a piece: one for each part of it, and one for its end."""
        tokens = piece.tokens
        if index in self._silent:
            # Not before the model has begun: clients take it for the first token.
            first = {"delta": {"role": "assistant", "content": ""}}
            is_first = len(self._silent) == len(self._messages)
            self._silent.discard(index)
            more = self._prompt_ids(0) if is_first else {}
            yield {"choices": [self._choice(index, first, (), None)], **more}
        for delta in self._deltas(index, piece):
            yield {"choices": [self._choice(index, {"delta": delta}, tokens, None)]}
            tokens = ()
        if piece.finish is not None or (tokens and (self._has_logprobs or self._has_ids)):
            reason = self._reason(index, piece)
            yield {"choices": [self._choice(index, {"delta": {}}, tokens, reason)]}

    def _deltas(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        sections = self._sections[index]
        parts = [sections.add(piece.text)]
        if piece.finish is not None:
            parts.append(sections.end(cut_by=piece.cut_by))
        for part in itertools.chain(*parts):
            if not isinstance(part, ParsedCall):
                kind, text = part
                yield {"content" if kind == "content" else "reasoning_content": text}
                continue
            call = {
                "index": self._num_calls[index],
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": part.name, "arguments": part.arguments},
            }
            self._num_calls[index] += 1
            yield {"tool_calls": [call]}

    def _reason(self, index: int, piece: Piece) -> str | None:
        has_calls = piece.finish == "stop" and self._num_calls[index] > 0
        return "tool_calls" if has_calls else piece.finish

    def _choice(
        self, index: int, message: dict[str, Any], tokens: Sequence[AnswerToken], reason: str | None
    ) -> dict[str, Any]:
        has_logprobs = self._has_logprobs and bool(tokens or "message" in message)
        logprobs = chat_logprobs(tokens, self._vocabulary) if has_logprobs else None
        choice = {"index": index, **message, "logprobs": logprobs, "finish_reason": reason}
        return {**choice, **self._ids(index, tokens, reason)}
