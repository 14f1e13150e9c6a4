"""What current clients send beside their prompts: taken where the answer is the same without."""

import copy
import json
from typing import Any

import pytest
from http_server import HEAD, TEMPLATE, ScriptedEngine, connected, response, served_engine

from moe_runtime.inference.generation import encode_messages
from moe_runtime.serving.http.schema import ChatBody, Message, parse_body
from moe_runtime.serving.http.served_model import ChatTemplate
from moe_runtime.serving.requests import Finished, GenerationRequest, PromptRead

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CACHE = {"cache_control": {"type": "ephemeral"}}


def asked_of_engine(staged: Any, *bodies: dict[str, Any]) -> list[GenerationRequest]:
    asked: list[GenerationRequest] = []
    engine = ScriptedEngine(lambda one: asked.append(one) or [PromptRead(0), Finished("length")])
    site = staged(engine)
    for body in bodies:
        site.answer(CHAT, {"messages": [USER], **body})
    return asked


def with_template(tokenizer: Any, template: str) -> Any:
    found = copy.deepcopy(tokenizer)
    found.chat_template = template
    return found


@pytest.mark.parametrize(
    ("more", "plain"),
    [
        (
            {
                **{"store": True, "service_tier": "flex", "verbosity": "low"},
                **{"modalities": ["text"], "prompt_cache_retention": "24h", "cache_prompt": False},
                **{"use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True},
                "include_stop_str_in_output": False,
            },
            {},
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, {"stream": True}),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **CACHE}]}]},
            {},
        ),
        ({"messages": [{**USER, **CACHE}]}, {}),
        ({"tools": [{**TOOL, **CACHE}]}, {"tools": [TOOL]}),
        (
            {"messages": [USER, {"role": "assistant", "content": "a", "annotations": []}, USER]},
            {"messages": [USER, {"role": "assistant", "content": "a"}, USER]},
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}, USER]},
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}, USER]},
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "reasoning": "b"}, USER]},
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b"}, USER]},
        ),
    ],
)
def test_fields_that_change_no_answer_are_taken(staged, more, plain):
    one, other = asked_of_engine(staged, more, plain)
    assert one == other


def test_templates_are_given_what_they_know(staged, tokenizer):
    given = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
    body = parse_body(ChatBody, json.dumps(given).encode())

    def rendered(template: str) -> str:
        one = ChatTemplate(with_template(tokenizer, template))
        return one.render(body.messages, variables=body.chat_template_kwargs)

    assert rendered("{{ messages[0].content }}") == "Hi"
    assert rendered("{{ messages[0].content }}{{ enable_thinking }}") == "HiFalse"
    assert "<think></think>" in rendered(TEMPLATE)
    knowing = with_template(
        tokenizer, TEMPLATE.replace("assistant:", "assistant({{ verbosity }}):")
    )
    plain, terse = (
        tokenizer.decode(one.prompt_ids)
        for one in asked_of_engine(lambda engine: staged(engine, knowing), {}, {"verbosity": "low"})
    )
    assert terse == plain.replace("()", "(low)") != plain


_LATER = "{% if m.role == 'system' and not loop.first %}"
_MOVED = "system=A,B user=C,D assistant=E tool=F user=G user=H"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", "system=A system=B user=C system=D assistant=E tool=F system=G user=H"),
        (f"{_LATER}{{{{ raise_exception('late') }}}}{{% endif %}}", "", _MOVED),
        (f"{_LATER}{{% else %}}", "{% endif %}", _MOVED),
    ],
)
def test_later_system_messages_are_the_users_where_a_template_takes_none(
    tokenizer, before, after, expected
):
    """Agents send them; Qwen3.5's template refuses them, that of gpt-oss leaves them out. Batches
    write the same prompts."""
    written = f"{before}{{{{ m.role }}}}={{{{ m.content }}}} {after}"
    source = f"{{% for m in messages %}}{written}{{% endfor %}}"
    tokenizer = with_template(tokenizer, source)
    template = ChatTemplate(tokenizer)
    roles: Any = ["system", "developer", "user", "system", "assistant", "tool", "system", "user"]
    messages = [
        Message(role=role, content=text) for role, text in zip(roles, "ABCDEFGH", strict=True)
    ]
    plain = [{"role": role, "content": text} for role, text in zip(roles, "ABCDEFGH", strict=True)]
    encoded = encode_messages(tokenizer, plain)["input_ids"][0]
    for found in (
        template.render(messages, add_generation_prompt=False),
        tokenizer.decode(encoded),
    ):
        assert found.replace("\n\n", ",").split() == expected.split()


def test_what_a_client_sent_is_cut_in_messages(staged):
    long = "x" * 100_000
    site = staged()
    choice = {"type": "function", "function": {"name": long}}
    for path, body, status in (
        (TEXT, {"prompt": "a", "model": long}, 404),
        (TEXT, {"prompt": "a", "response_format": {"type": long}}, 400),
        (TEXT, {"prompt": long}, 400),
        (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": choice}, 400),
    ):
        assert len(site.refused(path, body, status)["message"]) < 2100


def test_every_response_has_the_name_of_its_request(tokenizer):
    engine = ScriptedEngine(lambda _: [PromptRead(0), Finished("length")])
    with served_engine(engine, tokenizer) as site:
        for given, path in (("mine-1", "/v1/models"), ("a b", "/nowhere"), ("", "/health")):
            with connected(site) as client:
                asked = f"GET {path} HTTP/1.0\r\nhost: x\r\nx-request-id: {given}\r\n\r\n"
                client.sendall(asked.encode())
                head = client.recv(1 << 16).split(b"\r\n\r\n")[0].decode().lower()
            (name,) = (line[14:] for line in head.split("\r\n") if line.startswith("x-request-id:"))
            assert name == given if given == "mine-1" else name.startswith("req_")
    logged = [fields["id"][:4] for event, fields in site.log if event == "request"]
    assert logged == ["mine", "req_"]


def test_a_body_with_two_lengths_is_refused_and_ends_the_connection(tokenizer):
    """What is behind one of its two ends might be taken for a request of somebody else."""
    engine = ScriptedEngine(lambda _: [PromptRead(0), Finished("length")])
    with served_engine(engine, tokenizer) as site, connected(site) as client:
        head = (HEAD % 5).replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")
        client.sendall(head + b"0\r\n\r\nGET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
        status, found = response(client)
        assert (status, found["error"]["code"]) == (400, "two_lengths")
        assert client.recv(1) == b""


def test_more_messages_than_tokens_are_refused_before_they_are_rendered(staged, monkeypatch):
    def render(*args: Any, **options: Any) -> str:
        raise AssertionError("a template was rendered")

    monkeypatch.setattr(ChatTemplate, "render", render)
    messages = [{"role": "user", "content": ""}] * 3_000
    site = staged()
    for path in (CHAT, "/tokenize"):
        assert site.refused(path, {"messages": messages})["code"] == "context_length_exceeded"


def test_tokens_are_those_of_vllm(staged, tokenizer):
    messages = [USER, {"role": "assistant", "content": "Well"}]
    site = staged()
    ids = tokenizer("Hi")["input_ids"]
    expected = {"tokens": ids, "count": len(ids), "max_model_len": 1000, "token_strs": None}
    assert site.ask("/tokenize", {"prompt": "Hi", "add_special_tokens": True}) == (200, expected)
    _, found = site.ask("/tokenize", {"messages": messages, "continue_final_message": True})
    assert tokenizer.decode(found["tokens"]) == "user: Hi\nassistant: Well"
    given = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}}
    _, found = site.ask("/tokenize", given)
    assert tokenizer.decode(found["tokens"]).endswith("<think>\n")
    for more in ({"add_generation_prompt": True}, {"messages": [USER]}):
        body = {"messages": messages, "continue_final_message": True, **more}
        assert site.refused("/tokenize", body)["param"] == "continue_final_message"
    for name in ("continue_final_message", "chat_template_kwargs"):
        value = {} if "kwargs" in name else True
        assert site.refused("/tokenize", {"prompt": "Hi", name: value})["param"] == name
