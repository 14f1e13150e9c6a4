"""``/v1/chat/completions`` and ``/v1/completions``: requests for the engine, and its answers."""

from __future__ import annotations

import dataclasses
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    Vocabulary,
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
    completion_logprobs,
    encode_text,
    parts_of,
)
from moe_runtime.serving.http.schema import (
    AllowedTools,
    ChatBody,
    CompletionBody,
    Function,
    ImagePart,
    Message,
    NamedTool,
    TokenizeBody,
    Tool,
    TranslatedBody,
    client_fields,
)
from moe_runtime.serving.http.served_model import ChatTemplate, ServedModel
from moe_runtime.serving.http.tool_formats import ParsedCall

_FETCH_S = 10.0
"""For all pictures of a request together: they hold up the texts of other requests."""


def pictures_of(messages: Sequence[Message], model: ServedModel) -> list[Picture]:
    """The pictures of a conversation, in order; a `FieldError` names one that cannot be read."""
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
            except MoERuntimeError as error:  # the checkpoint or installation cannot read pictures
                raise unsupported(place, str(error)) from None
            num_tokens = sum(len(picture.ids) for picture in found)
            if num_tokens > most:  # before more of them take memory
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
        blamed_on(f"cannot fetch {url[:60]}", PictureError),
        urllib.request.urlopen(url, timeout=_FETCH_S) as answer,
    ):
        data = bytearray()
        while len(data) <= MOST_BYTES and (part := answer.read1(1 << 16)):
            data += part
            if time.monotonic() > end_s:
                raise TimeoutError(f"not whole after {_FETCH_S:g} s")
        return bytes(data)


def prepare(body: ChatBody, model: ServedModel, most_choices: int, owner: str = "") -> Prepared:
    choices, sections = prepare_parts(body, model, most_choices, owner)
    return choices, partial(ChatAnswers, body=body, sections=sections)


def prepare_parts(
    body: ChatBody, model: ServedModel, most_choices: int, owner: str, *, fits: bool = False
) -> tuple[list[AnswerChoice], list[Sections]]:
    """Sequences for the engine, and what splits the text of each answer.

    ``fits`` shortens answers that would not fit into the context.
    """
    check_choices(body, 1, most_choices)
    if body.top_logprobs is not None and not body.logprobs:
        raise FieldError("top_logprobs", "needs logprobs: true")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise FieldError("max_tokens", "is the old name of max_completion_tokens; give one")
    chat = _Chat(body, model)
    ids = encode_text(chat.prompt, model, "messages", add_special_tokens=False)
    check_tokens(ids, model, "messages")
    given = body.max_completion_tokens
    most_new = body.max_tokens if given is None else given
    if fits and most_new is not None:
        most_new = min(most_new, max(model.engine.most_request_tokens - len(ids), 1))
    choices = choices_for(
        body,
        model,
        [ids],
        pictures=place(ids, chat.pictures),
        max_tokens=most_new,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        matcher=chat.matcher(owner),
        shown_tokens=chat.shown_tokens(),
    )
    if body.continue_final_message:
        for choice in choices:
            choice.text.follow(ids, is_whole=True)
    return choices, [chat.sections() for _ in choices]


class _Chat:
    """A request as the model gets it: its prompt, and the grammar and form of its answers.

    ``how`` is the form of calls; None if the model writes none, or if JSON is the answer itself.
    """

    def __init__(self, body: ChatBody, model: ServedModel) -> None:
        self._body, self._model, self._template = body, model, template_of(model)
        self._tokens = model.vocabulary.mark_tokens
        template, choice = self._template, body.tool_choice
        tools, self._functions = _tools_of(body)
        if tools and template.tools is None and not template.is_harmony:
            raise unsupported("tools", "this model's way of calling them is not known")
        self._is_bounded, self._is_named = (
            isinstance(choice, kind) for kind in (AllowedTools, NamedTool)
        )
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        self._needs_call = mode == "required" or self._is_named
        self.prompt, self.pictures = prompt_of(body, model, tools, self._variables())
        self._kind = (body.response_format or {}).get("type", "text")
        self._how = template.tools if self._functions else None
        if self._how is not None and self._kind != "text":
            is_json = self._kind in ("json_object", "json_schema")
            self._how = None if is_json else dataclasses.replace(self._how, bare=None)

    def _variables(self) -> dict[str, Any]:
        body, knows = self._body, self._template.knows
        variables = dict(body.chat_template_kwargs or {})
        if body.verbosity is not None and knows("verbosity"):
            variables["verbosity"] = body.verbosity
        if body.reasoning_effort is not None:
            if not knows("reasoning_effort"):
                raise unsupported("reasoning_effort", "this model's chat template knows none")
            variables["reasoning_effort"] = body.reasoning_effort
        return variables

    def sections(self) -> Sections:
        if self._template.is_harmony:
            return HarmonySections(self._functions, self.prompt)
        begins_with = "reasoning" if self._template.opens_reasoning(self.prompt) else "content"
        return AnswerSections(self._template.reasoning, self._how, self._functions, begins_with)

    def shown_tokens(self) -> tuple[str, ...]:
        """Special tokens that the text of answers keeps, to find calls and reasoning."""
        if self._template.is_harmony:
            return HARMONY_MARKS
        marks = (*(self._template.reasoning or ()), *(self._how.shown_tokens if self._how else ()))
        return tuple(token for token in self._tokens if any(token in mark for mark in marks))

    def matcher(self, owner: str) -> Any:
        """The compiled grammar of answers, or None.

        An error names the function at fault, if it is a single one.
        """
        found = self._grammar()
        if found is None:
            return None
        compile_, (text, param) = self._model.grammars.compile, found
        text = self._after_reasoning(text, param)
        try:
            return compile_(text, param, owner)
        except FieldError:
            for at, tool in enumerate(self._body.tools or ()):
                if (one := tool.function).is_strict and one in self._functions:
                    where = one.place or f"tools.{at}.function.parameters"
                    compile_(grammars.of_function(one), where, owner)
            raise

    def _grammar(self) -> tuple[str, str] | None:
        """The grammar of answers, and the field that asks for it."""
        asked, how = self._body.response_format, self._template.tools
        functions, param = self._functions, "response_format"
        grammar = None if asked is None else grammars.of_response_format(asked)
        is_strict = any(function.is_strict for function in functions)
        is_alone = self._body.parallel_tool_calls is False
        is_forced = self._needs_call or self._is_bounded
        # gpt-oss ends its answer with a call, so there is at most one.
        if functions and (is_forced or is_strict or (is_alone and how is not None)):
            if grammar is not None:
                raise FieldError(param, "cannot be combined with tools that are enforced")
            param = "tools" if is_strict else "parallel_tool_calls"
            param = "tool_choice" if is_forced else param
            if how is None:
                grammar = grammars.of_harmony_call(functions, is_needed=self._needs_call)
            else:
                may_repeat = not is_alone and not self._is_named
                needs = {"is_needed": self._needs_call, "may_repeat": may_repeat}
                grammar = grammars.of_tools(functions, how, self._tokens, **needs)
        return None if grammar is None else (grammar, param)

    def _after_reasoning(self, text: str, param: str) -> str:
        """Allows reasoning before a grammar, if the model may reason."""
        is_own, template = self._kind == "grammar", self._template
        if template.is_harmony:
            if HarmonySections(prompt=self.prompt).is_within_message:
                if param != "response_format" and not self._needs_call:
                    raise unsupported(param, "cannot be enforced in a message that has begun")
                return text
            if is_own:
                raise FieldError(param, "a grammar in Lark cannot follow this model's analysis")
            return grammars.after_analysis(text, is_call=param != "response_format")
        marks, is_open = template.reasoning, template.opens_reasoning(self.prompt)
        is_over = template.closes_reasoning(self.prompt)
        if marks is None or is_over or (is_own and not is_open):
            return text
        if is_own:
            raise FieldError(param, "a grammar in Lark cannot follow reasoning; turn it off")
        opens = self._how.opens if self._how else ()
        return grammars.after_reasoning(
            text, marks, self._tokens, is_open=is_open, opens_calls=opens
        )


def _tools_of(body: ChatBody) -> tuple[list[Tool], list[Function]]:
    """The tools in the prompt, and the functions that the model may call."""
    tools, choice = body.tools or [], body.tool_choice
    by_name = {tool.function.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise FieldError("tools", "two functions have the same name")
    if choice == "none":
        return [], []
    if choice is not None and not tools:
        raise FieldError("tool_choice", "needs tools")
    if isinstance(choice, NamedTool):
        place, allowed = "tool_choice.function.name", [choice.function.name]
    elif isinstance(choice, AllowedTools):
        given = choice.allowed_tools.tools
        place, allowed = "tool_choice.allowed_tools.tools", [one.function.name for one in given]
    else:
        return tools, [tool.function for tool in tools]
    if unknown := [name for name in allowed if name not in by_name]:
        raise FieldError(place, f"is none of the tools: {clipped(min(unknown))}")
    shown = [by_name[allowed[0]]] if isinstance(choice, NamedTool) else tools
    return shown, [by_name[name].function for name in by_name if name in allowed]


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
    model: ServedModel,
    tools: Sequence[Tool] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, list[Picture]]:
    """A conversation as the chat template renders it, and its pictures.

    ``tools`` and ``variables`` are those of the body by default.
    """
    messages = body.messages or []
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise FieldError("continue_final_message", "excludes add_generation_prompt")
    if continues and messages[-1].role != "assistant":
        raise FieldError("continue_final_message", "needs a last message of the assistant")
    most = model.engine.most_request_tokens
    if len(messages) > most:  # rendering it would take long
        raise too_long(f"{len(messages)} messages", most, "messages")
    pictures = pictures_of(messages, model)
    prompt = template_of(model).render(
        messages,
        body.tools or () if tools is None else tools,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=body.chat_template_kwargs if variables is None else variables,
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
    """The number of tokens of a conversation's prompt."""
    with client_fields(body.names):
        prompt, _ = prompt_of(to_chat(body, model, owner), model)
        return model.vocabulary.count(prompt, model.engine.most_request_tokens)


class ChatAnswers(ChoiceAnswers):
    def __init__(
        self, generation: Generation, *, body: ChatBody, sections: Sequence[Sections]
    ) -> None:
        kinds = "chat.completion", "chat.completion.chunk"
        super().__init__(generation, body, kinds, "chatcmpl")
        self._has_logprobs = bool(body.logprobs)
        self._sections = sections
        self._num_calls = [0] * len(sections)
        self._messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": None} for _ in sections
        ]

    def collect(self, index: int, piece: Piece) -> str | None:
        message = self._messages[index]
        for delta in self._deltas(index, piece):
            for field, value in delta.items():
                message[field] = value if message.get(field) is None else message[field] + value
        return self._reason(index, piece)

    def collected(self) -> dict[str, Any]:
        choices = []
        for index, message in enumerate(self._messages):
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            for call in message.get("tool_calls", ()):
                del call["index"]
            found = {"message": message}, self.tokens[index], self.reasons[index]
            choices.append(self._choice(index, *found))
        return {"choices": choices, **self._prompt_ids(0)}

    def chunk_fields(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        tokens = piece.tokens
        if index in self._silent:
            # Clients take this chunk for the first token, so it waits for the first piece.
            first = {"delta": {"role": "assistant", "content": ""}}
            more = self._prompt_ids(0) if len(self._silent) == len(self._messages) else {}
            self._silent.discard(index)
            yield {"choices": [self._choice(index, first, (), None)], **more}
        for delta in self._deltas(index, piece):
            yield {"choices": [self._choice(index, {"delta": delta}, tokens, None)]}
            tokens = ()
        if piece.finish is not None or (tokens and (self._has_logprobs or self._has_ids)):
            reason = self._reason(index, piece)
            yield {"choices": [self._choice(index, {"delta": {}}, tokens, reason)]}

    def _deltas(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        for part in parts_of(piece, self._sections[index]):
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


_DEFAULT_MAX_TOKENS = 16


def _prompts_of(given: Any) -> list[str] | list[list[int]]:
    prompts = [given] if isinstance(given, str) or _is_tokens(given) else given
    is_list = isinstance(prompts, list) and bool(prompts)
    if is_list and (all(isinstance(one, str) for one in prompts) or all(map(_is_tokens, prompts))):
        return prompts
    raise FieldError(
        "prompt",
        "expected a string, a list of strings, token ids (integers from 0 on), or a list of lists "
        "of token ids",
    )


def _is_tokens(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(type(token) is int and token >= 0 for token in value)


class Echo(NamedTuple):
    """A prompt that its answers repeat, and the offsets of its tokens in the text."""

    text: str
    offsets: Sequence[int]


def prepare_completion(
    body: CompletionBody, model: ServedModel, most_choices: int, owner: str = ""
) -> Prepared:
    given = _prompts_of(body.prompt)
    check_choices(body, len(given), most_choices)
    adds = body.add_special_tokens is not False
    prompts = []
    for one in given:
        is_text = isinstance(one, str)
        ids = encode_text(one, model, "prompt", add_special_tokens=adds) if is_text else one
        check_tokens(ids, model, "prompt")
        prompts.append(ids)
    asked = body.response_format
    grammar = None if asked is None else grammars.of_response_format(asked)
    choices = choices_for(
        body,
        model,
        prompts,
        max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.logprobs if body.echo else None,
        matcher=model.grammars.compile(grammar, "response_format", owner) if grammar else None,
    )
    echoes = []
    num_each = body.n or 1
    for number, one in enumerate(given):
        prompt, answers = prompts[number], choices[number * num_each :][:num_each]
        held = [answer.text.follow(prompt, is_whole=isinstance(one, str)) for answer in answers]
        if body.echo:
            echoes.append(_echo(one, prompt, held[0], body, model.vocabulary))
    return choices, partial(CompletionAnswers, body=body, echoes=echoes)


def _echo(
    given: str | list[int],
    ids: Sequence[int],
    num_held: int,
    body: CompletionBody,
    vocabulary: Vocabulary,
) -> Echo:
    """A prompt without the ``num_held`` last tokens: their character ends in the answer."""
    offsets: Sequence[int] = ()
    if isinstance(given, str):
        if body.logprobs is not None:
            adds = body.add_special_tokens is not False
            offsets = vocabulary.offsets_of_text(given, ids, add_special_tokens=adds)
        return Echo(given, offsets)
    text = vocabulary.decode(given[: len(given) - num_held])
    if body.logprobs is not None:
        offsets = [min(at, len(text)) for at in vocabulary.offsets_of_tokens(given)]
    return Echo(text, offsets)


class CompletionAnswers(ChoiceAnswers):
    """Texts; with ``echoes`` each begins with its prompt."""

    def __init__(
        self, generation: Generation, *, body: CompletionBody, echoes: Sequence[Echo]
    ) -> None:
        super().__init__(generation, body, ("text_completion", "text_completion"), "cmpl")
        self._has_logprobs = body.logprobs is not None
        self._echoes = [echo for echo in echoes for _ in range(body.n or 1)]
        self._texts = [""] * len(generation.choices)

    def collect(self, index: int, piece: Piece) -> str | None:
        self._texts[index] += piece.text
        return piece.finish

    def collected(self) -> dict[str, Any]:
        every = enumerate(zip(self._texts, self.tokens, self.reasons, strict=True))
        return {"choices": [self._choice(index, *found, is_first=True) for index, found in every]}

    def chunk_fields(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        is_first = index in self._silent
        has_tokens = piece.tokens and (self._has_logprobs or self._has_ids)
        has_echo = is_first and self._echoes and self._echoes[index].text
        if piece.text or piece.finish or has_tokens or has_echo:
            self._silent.discard(index)
            choice = self._choice(index, piece.text, piece.tokens, piece.finish, is_first=is_first)
            yield {"choices": [choice]}

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[AnswerToken],
        reason: str | None,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        echo = self._echoes[index] if self._echoes else None
        prompt = "" if echo is None else echo.text
        logprobs = None
        if self._has_logprobs:
            # Offsets count from the beginning of the echoed prompt.
            before = self._prompt_tokens(index, echo) if is_first and echo else ()
            logprobs = completion_logprobs(before, self._vocabulary)
            later = completion_logprobs(tokens, self._vocabulary, len(prompt))
            logprobs = {name: logprobs[name] + later[name] for name in logprobs}
        return {
            "index": index,
            "text": prompt + text if is_first else text,
            "logprobs": logprobs,
            "finish_reason": reason,
            **self._ids(index, tokens, reason),
            **(self._prompt_ids(index) if is_first else {}),
        }

    def _prompt_tokens(self, index: int, echo: Echo) -> tuple[AnswerToken, ...]:
        choice = self.generation.choices[index]
        ids = choice.request.prompt_ids
        logprobs = (choice.prompt and choice.prompt.logprobs) or [None] * len(ids)
        return tuple(
            AnswerToken(token_id, one and one.logprob, one.top if one else (), offset)
            for token_id, offset, one in zip(ids, echo.offsets, logprobs, strict=True)
        )
