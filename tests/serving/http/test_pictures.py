"""Pictures in chats: the text of transformers, prefixes that tell them apart, and limits."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import picture_checkpoints as pc
import pytest
import torch
from http_server import Served, served_pictures
from PIL import Image

from moe_runtime.checkpoints.opening import load_tokenizer, read_config
from moe_runtime.checkpoints.transformers_private import picture_processor
from moe_runtime.serving.http import chat

if TYPE_CHECKING:
    import openai

NUM_NEW = 8
of_one_family = pytest.mark.parametrize("folder", list(pc.TABLE)[:1], indirect=True)
"""What the server does with any model."""
Parts = Sequence[str | Image.Image]


@pytest.fixture(scope="module", params=pc.TABLE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pc.save_seeing_checkpoint(request.param, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return pc.model_of(folder)


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Served]:
    with served_pictures(folder) as found:
        yield found


@pytest.fixture(scope="module")
def client(site: Served) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{site.address}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, *turns: Any) -> Any:
    """The answer to turns of the user and the assistant."""
    roles = ["user", "assistant"] * len(turns)
    messages: Any = [
        {"role": role, "content": turn if isinstance(turn, str) else pc.content_of(turn)}
        for role, turn in zip(roles, turns, strict=False)
    ]
    return client.chat.completions.create(
        model="seeing", messages=messages, temperature=0, max_tokens=NUM_NEW, logprobs=True
    )


def expected(reference: Any, folder: Path, *turns: Any) -> list[float]:
    """Log-probabilities of the greedy answer of transformers."""
    tokenizer = load_tokenizer(folder)
    processor = picture_processor(folder, read_config(folder), tokenizer)
    conversation, images = [], []
    for role, turn in zip(["user", "assistant"] * len(turns), turns, strict=False):
        parts: Any = turn
        if not isinstance(turn, str):
            images += [part for part in turn if not isinstance(part, str)]
            parts = [
                {"type": "text", "text": one} if isinstance(one, str) else {"type": "image"}
                for one in turn
            ]
        conversation.append({"role": role, "content": parts})
    prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    given = processor(
        text=[prompt], images=images or None, return_tensors="pt", add_special_tokens=False
    )
    inputs = pc.known_inputs(reference, given)
    out = reference.generate(
        **inputs,
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    rows = torch.cat(out.logits).log_softmax(-1)
    return rows.max(-1).values.tolist()


def logprobs(answer: Any) -> list[float]:
    return [token.logprob for token in answer.choices[0].logprobs.content]


TALKS: dict[str, list[Any]] = {
    "one": [[pc.picture(0), "What is it?"]],
    "two of odd sizes, between texts": [
        ["First", pc.picture(1, 17, 31), "and then", pc.picture(2, 40, 9), "which is larger?"]
    ],
    "none": ["Hello there"],
    "another of the same size": [[pc.picture(3), "What is it?"]],
    "a second turn": [[pc.picture(0), "What is it?"], "a cat", "Are you sure?"],
    "a picture in the second turn": ["Look", "yes", ["at", pc.picture(4)]],
}


FIRST, *OTHERS = pc.TABLE
KEEPS_NONE = "Qwen4ExpForConditionalGeneration"
"""A family that keeps no prefixes."""
IN_OTHERS = {"one", "another of the same size"}
"""The second turn has the first picture too, and another is in the test of prefixes."""
OF_ALL = "two of odd sizes, between texts"
"""What families do differently, which is how pictures lie in a prompt; the rest is the server's."""


@pytest.mark.parametrize(
    ("folder", "talk"),
    [
        pytest.param(
            *(name, talk),
            id=f"{name}, {kind}",
            marks=[pytest.mark.long] * (kind in IN_OTHERS or (name != FIRST and kind != OF_ALL)),
        )
        for name in pc.TABLE
        for kind, talk in TALKS.items()
    ],
    indirect=["folder"],
)
def test_an_answer_is_that_of_transformers(client, reference, folder, talk):
    found = logprobs(ask(client, *talk))
    wanted = expected(reference, folder, *talk)[: len(found)]
    assert found == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(
    "folder", [name for name in pc.TABLE if name in (FIRST, KEEPS_NONE)], indirect=True
)
def test_a_second_turn_uses_the_prefix_and_another_picture_does_not(
    site, client, reference, folder
):
    def cached_tokens(answer: Any) -> int:
        return answer.usage.prompt_tokens_details.cached_tokens

    first = [pc.picture(7), "Describe what you see in this picture, please."]
    one, again = ask(client, first), ask(client, first, "a cat", "Are you sure?")
    seen = [pc.picture(8), *first[1:]]
    other = ask(client, seen)
    keeps = site.server.models["seeing"].engine._passes.keeps_prefixes
    assert (cached_tokens(again) > cached_tokens(other)) == keeps
    assert logprobs(one) != pytest.approx(logprobs(other), abs=1e-3)
    wanted = expected(reference, folder, seen)
    assert logprobs(other) == pytest.approx(wanted[: len(logprobs(other))], abs=1e-3)


TURN: Any = [pc.picture(5), "What is it?"]


@of_one_family
def test_the_responses_api_gives_the_same_text(client):
    wanted = ask(client, TURN)
    image = {"type": "input_image", "image_url": pc.data_url(TURN[0]), "detail": "auto"}
    content: Any = [image, {"type": "input_text", "text": TURN[1]}]
    asked: Any = {"model": "seeing", "temperature": 0, "max_output_tokens": NUM_NEW}
    found = client.responses.create(input=[{"role": "user", "content": content}], **asked)
    assert found.output_text == wanted.choices[0].message.content
    again = client.responses.create(input="Sure?", previous_response_id=found.id, **asked)
    kept = ask(client, TURN, found.output_text, "Sure?")
    assert again.output_text == kept.choices[0].message.content


@of_one_family
def test_pictures_that_tools_give_are_in_a_message_of_the_user(site):
    url = pc.data_url(TURN[0])
    function = {"name": "look", "arguments": "{}"}
    plain = [{"role": "user", "content": "Look."}, None, None]
    calls = [{"id": "1", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "1", "content": "Here"}
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TURN[1]}]
    plain[1:] = [{"role": "assistant", "tool_calls": calls}, result]
    plain.append({"role": "user", "content": parts})
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    shown = [{"type": "text", "text": "Here"}, {"type": "image", "source": source}]
    blocks = [{"type": "tool_result", "tool_use_id": "1", "content": shown}]
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    of_anthropic = [plain[0], {"role": "assistant", "content": [use]}]
    of_anthropic.append({"role": "user", "content": [*blocks, parts[1]]})
    output = [{"type": "input_text", "text": "Here"}, {"type": "input_image", "image_url": url}]
    items = [plain[0], {"type": "function_call", "call_id": "1", **function}]
    items.append({"type": "function_call_output", "call_id": "1", "output": output})
    items.append({"role": "user", "content": TURN[1]})
    greedy = {"temperature": 0}
    _, wanted = site.ask(
        "/v1/chat/completions", {"messages": plain, "max_tokens": NUM_NEW, **greedy}
    )
    text = wanted["choices"][0]["message"]["content"]
    body = {"messages": of_anthropic, "max_tokens": NUM_NEW, **greedy}
    assert site.ask("/v1/messages", body)[1]["content"][0]["text"] == text
    body = {"input": items, "max_output_tokens": NUM_NEW, **greedy}
    assert site.ask("/v1/responses", body)[1]["output"][0]["content"][0]["text"] == text
    counted = site.ask("/v1/responses/input_tokens", {"input": items})[1]
    num_tokens = wanted["usage"]["prompt_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": num_tokens}


@of_one_family
def test_the_messages_api_gives_the_same_text(site, client):
    import anthropic

    wanted = ask(client, TURN)
    head, _, data = pc.data_url(TURN[0]).partition(",")
    source = {"type": "base64", "media_type": head[5:].partition(";")[0], "data": data}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": TURN[1]}]
    messages: Any = [{"role": "user", "content": content}]
    with anthropic.Anthropic(base_url=site.address, api_key="none", max_retries=0) as speaker:
        counted = speaker.messages.count_tokens(model="seeing", messages=messages)
        found = speaker.messages.create(
            model="seeing", messages=messages, max_tokens=NUM_NEW, extra_body={"temperature": 0}
        )
    text = "".join(block.text for block in found.content if block.type == "text")
    assert text == wanted.choices[0].message.content
    assert wanted.usage is not None
    assert counted.input_tokens == wanted.usage.prompt_tokens


def refusal(site: Served, content: list[Any], role: str = "user") -> Any:
    body = {"messages": [{"role": role, "content": content}], "max_tokens": 2}
    status, answer = site.ask("/v1/chat/completions", body)
    assert status == 400, answer
    return answer["error"]


URL = {"type": "image_url", "image_url": {"url": "https://127.0.0.1:1/picture.png"}}


@of_one_family
@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (URL, "--allow-remote-images"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "expected a data URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,x"}}, "data:image/png;base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "expected base64"),
        ({"type": "image_url", "image_url": {"url": "data:;base64,QUJD"}}, "not a whole picture"),
        (pc.content_of([Image.new("1", (9000, 5000))])[0], "9000 x 5000 pixels"),
    ],
    ids=["address", "file", "no base64", "bad base64", "text", "too many pixels"],
)
def test_what_is_no_picture_is_refused(site, part, complaint):
    error = refusal(site, [{"type": "text", "text": "Look"}, part])
    assert complaint in error["message"]
    assert error["param"] == "messages.0.content.1.image_url"


@of_one_family
def test_pictures_have_a_place_and_an_end(site):
    (image,) = pc.content_of([pc.picture(0)])
    assert "may be in a message of the user" in refusal(site, [image], "system")["message"]
    many = refusal(site, [image] * 33)["message"]
    assert "may have 32 pictures" in many
    tokenizer = site.server.models["seeing"].vocabulary.tokenizer
    mark = {"type": "text", "text": tokenizer.image_token}
    assert "leave it out of texts" in refusal(site, [image, mark])["message"]


class Files(SimpleHTTPRequestHandler):
    """Those of a folder, and one that comes byte by byte for ever."""

    def do_GET(self) -> None:
        if self.path != "/endless":
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # the server gave up
            while True:
                self.wfile.write(b"x")
                time.sleep(0.01)


@of_one_family
def test_addresses_are_fetched_where_the_server_may(site, client, tmp_path, monkeypatch):
    model = replace(site.server.models["seeing"], fetches_pictures=True)
    monkeypatch.setitem(site.server.models.place("seeing").served, "seeing", model)
    (tmp_path / "picture.png").write_bytes(pc.png(TURN[0]))
    handler = partial(Files, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        thread = threading.Thread(target=files.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{files.server_port}"
            image = {"type": "image_url", "image_url": {"url": f"{url}/picture.png"}}
            absent = {"type": "image_url", "image_url": {"url": f"{url}/none.png"}}
            content: Any = [image, {"type": "text", "text": TURN[1]}]
            found = client.chat.completions.create(
                model="seeing",
                messages=[{"role": "user", "content": content}],
                temperature=0,
                max_tokens=NUM_NEW,
            )
            assert "cannot fetch" in refusal(site, [absent])["message"]
            clock = SimpleNamespace(monotonic=itertools.count().__next__)  # a second a part
            monkeypatch.setattr(chat, "time", clock)
            slow = {"type": "image_url", "image_url": {"url": f"{url}/endless"}}
            assert "not whole after 10 s" in refusal(site, [slow])["message"]
        finally:
            files.shutdown()
            thread.join()
    wanted = ask(client, TURN).choices[0].message.content
    assert found.choices[0].message.content == wanted
